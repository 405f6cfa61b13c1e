"""Without keys no web page from elsewhere may use the API through a browser of this machine; programs always may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.config.schema import Config, ServerConfig
from octavo.plugins.openai.app import build_app
from octavo.plugins.openai.auth import NEEDS, PUBLIC
from tests.gateway.tenants import Clock, bearer, guarded, make
from tests.gateway.test_generate import USER

pytestmark = pytest.mark.anyio

PAGE = "https://evil.example"
HERE = "http://localhost:8000"


def client(engine: Any, **server: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(engine, Config(server=ServerConfig(**server))))
    return httpx.AsyncClient(transport=transport, base_url=HERE)


async def asked(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"messages": USER}, headers=headers)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "[::1"]
)
async def test_names_that_are_not_of_this_server_are_refused(engine: Any, host: str) -> None:
    async with client(engine) as http:
        refused = await asked(http, host=host)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_host")
    assert not engine.seen


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7"]
)
async def test_addresses_and_localhost_are_taken_with_pages_from_there(engine: Any, host: str) -> None:
    async with client(engine) as http:
        assert (await asked(http, host=host)).status_code == 200
        assert (await asked(http, host=host, origin=f"http://{host}")).status_code == 200


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:3000", "https://localhost.evil.example"])
async def test_pages_from_elsewhere_are_refused(engine: Any, origin: str) -> None:
    """Whatever the type of the body says: a simple request needs no preflight."""
    async with client(engine) as http:
        for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded", ""):
            refused = await asked(http, origin=origin, **{"content-type": kind})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_origin")
    assert not engine.seen


async def test_every_route_that_costs_or_shows_anything_refuses_them(engine: Any) -> None:
    async with client(engine) as http:
        for headers in ({"host": "evil.example"}, {"origin": PAGE}):
            for method in ("GET", "POST"):
                shut = {path: (await http.request(method, path, headers=headers)).status_code for path in NEEDS}
                assert set(shut.values()) == {403}, shut
        for path in PUBLIC - {"/dashboard"}:
            assert (await http.get(path, headers={"host": "evil.example"})).status_code == 200


async def test_what_is_listed_may_ask_and_read(engine: Any) -> None:
    async with client(engine, hosts="ai.example, gpu", origins=f"{PAGE},http://localhost:3000") as http:
        for host in ("ai.example", "gpu:8000"):
            assert (await asked(http, host=host)).status_code == 200
        answer = await asked(http, origin=PAGE)
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        wanted = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        before = await http.options("/v1/chat/completions", headers={"origin": PAGE, **wanted})
        assert before.status_code == 200
        assert "authorization" in before.headers["access-control-allow-headers"]
        assert (await asked(http, origin="https://other.example")).status_code == 403


async def test_who_serves_everyone_is_asked_by_any_name_but_not_by_foreign_pages(engine: Any) -> None:
    async with client(engine, host="0.0.0.0", open=True) as http:
        assert (await asked(http, host="octavo.svc.cluster.local")).status_code == 200
        assert (await asked(http, host="octavo.svc", origin=PAGE)).status_code == 403


async def test_with_keys_any_name_will_do(engine: Any, tmp_path: Path) -> None:
    key = make(tmp_path / "keys.db", "alice")
    async with guarded(tmp_path / "keys.db", engine, Clock()) as (http, _):
        answer = await asked(http, host="ai.example", origin=PAGE, **bearer(key))
        assert answer.status_code == 200
        assert (await asked(http, host="ai.example", origin=PAGE)).status_code == 401
