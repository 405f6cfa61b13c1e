"""API keys: who gets in, whose cache it is, what it may cost; and the command that makes them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.cli import main
from octavo.core.config.schema import Config, ServerConfig
from octavo.plugins.openai.app import CANNOT_BIND, build_app, run, unsafe
from octavo.plugins.openai.limits import Allowance
from tests.gateway.test_errors import error

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def make(capsys: pytest.CaptureFixture[str], file: Path, name: str, *options: str) -> str:
    assert main(["keys", "new", name, "--file", str(file), *options]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def plain(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return make(capsys, file, "alice")


@pytest.fixture
async def guarded(plain: str, file: Path, engine: Any, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(engine, Config(server=ServerConfig(keys_file=str(file)))))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=10) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ROUTES = [
    ("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/server_info"), ("GET", "/model_info"), ("POST", "/v1/embeddings"),
    ("GET", "/metrics"), ("GET", "/nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "route"), ROUTES)
@pytest.mark.parametrize("given", [{}, bearer(""), bearer("sk-octavo-wrong"), {"authorization": "Basic eDp5"}])
async def test_without_a_good_key_no_route_says_anything(
    guarded: httpx.AsyncClient, engine: Any, method: str, route: str, given: dict[str, str]
) -> None:
    response = await guarded.request(method, route, headers=given, json=BODY if method == "POST" else None)
    error(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"
    assert not engine.seen


async def test_what_is_public(guarded: httpx.AsyncClient) -> None:
    for route in ("/health", "/ping", "/version"):
        assert (await guarded.get(route)).status_code == 200


async def test_a_key_opens_its_tenant(guarded: httpx.AsyncClient, plain: str, engine: Any) -> None:
    assert (await guarded.post(CHAT, json=BODY, headers=bearer(plain))).status_code == 200
    assert engine.tenants == ["alice"]
    assert (await guarded.get("/v1/models", headers=bearer(plain))).status_code == 200
    assert error(await guarded.get("/server_info", headers=bearer(plain)), 403)["code"] == "admin_only"


async def test_keys_come_and_go_while_it_runs(
    guarded: httpx.AsyncClient, plain: str, file: Path, engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bob = make(capsys, file, "bob", "--tenant", "works", "--admin")
    assert (await guarded.get("/server_info", headers=bearer(bob))).status_code == 200
    assert (await guarded.post(CHAT, json=BODY, headers=bearer(bob))).status_code == 200
    assert engine.tenants == ["works"]
    assert main(["keys", "revoke", "alice", "--file", str(file)]) == 0
    error(await guarded.post(CHAT, json=BODY, headers=bearer(plain)), 401)
    file.write_text("not JSON")
    assert (await guarded.post(CHAT, json=BODY, headers=bearer(bob))).status_code == 200, (
        "a broken file changes nothing"
    )


async def test_a_limit_of_requests(guarded: httpx.AsyncClient, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = make(capsys, file, "two", "--requests-per-minute", "2")
    answers = [await guarded.post(CHAT, json=BODY, headers=bearer(two)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert error(answers[2], 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert (await guarded.get("/v1/models", headers=bearer(two))).status_code == 200, "only what is posted counts"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_of_tokens(
    guarded: httpx.AsyncClient, file: Path, capsys: pytest.CaptureFixture[str], engine: Any, stream: bool
) -> None:
    """An answer is let through while anything is left, and then costs what it costs."""
    few = make(capsys, file, "few", "--tokens-per-minute", "10")
    body = {**BODY, "stream": stream}
    first = await guarded.post(CHAT, json=body, headers=bearer(few))
    assert first.status_code == 200
    second = await guarded.post(CHAT, json=body, headers=bearer(few))
    assert second.status_code == 200, f"2 + {len(engine.answer)} of 10 tokens are spent"
    third = await guarded.post(CHAT, json=body, headers=bearer(few))
    assert error(third, 429)["message"].startswith("this key's tokens per minute")
    assert third.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_without_a_keys_file_an_empty_key_is_fine(http: httpx.AsyncClient, engine: Any) -> None:
    assert (await http.post(CHAT, json=BODY, headers=bearer(""))).status_code == 200
    assert engine.tenants == [""]
    assert "x-ratelimit-limit-requests" not in (await http.post(CHAT, json=BODY)).headers


def test_the_file_has_no_key_and_nobody_else_reads_it(
    file: Path, plain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plain.removeprefix("sk-octavo-") not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert [key["name"] for key in json.loads(file.read_text())] == ["alice"]
    assert main(["keys", "list", "--file", str(file)]) == 0
    assert "alice" in capsys.readouterr().out
    for wrong in (["new", "alice"], ["revoke", "nobody"], ["new", "x", "--requests-per-minute", "0"]):
        assert main(["keys", *wrong, "--file", str(file)]) == 1
    assert list(file.parent.iterdir()) == [file]


def test_an_allowance_fills_with_time() -> None:
    allowance = Allowance(requests=60, tokens=600, now=0.0)
    assert [allowance.take_request(0.0) for _ in range(60)] == [None] * 60
    assert allowance.take_request(0.0) == ("requests", 1.0)
    assert allowance.take_request(1.0) is None
    allowance.spend_tokens(1200, 1.0)  # an answer longer than all that was left: a debt
    refused = allowance.take_request(30.0)
    assert refused is not None
    what, wait = refused
    assert what == "tokens"
    assert wait == pytest.approx((1 + 1200 - 600 - 290) / 10)
    assert allowance.take_request(30.0 + wait + 0.001) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "server.example"])
def test_a_public_address_needs_keys(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(Config(server=ServerConfig(host=host)), tmp_path, 1)
    assert raised.value.code == CANNOT_BIND
    assert "octavo keys new" in capsys.readouterr().err
    assert unsafe(ServerConfig(host=host, keys_file="keys.json")) is None
    assert unsafe(ServerConfig(host=host, open=True)) is None
    assert unsafe(ServerConfig(host="::1")) is None
