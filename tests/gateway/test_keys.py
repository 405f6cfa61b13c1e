"""API keys: who gets in, and whose cache it is; the file they are in, and the command that makes them."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.cli import main
from octavo.core.config.schema import Config, ServerConfig
from octavo.plugins.metrics.service import Metrics
from octavo.plugins.openai.app import CANNOT_BIND, build_app, run, unsafe
from octavo.plugins.openai.auth import NEEDS, PUBLIC, Auth
from octavo.plugins.openai.tenants import keys
from octavo.plugins.openai.tenants.account import Accounts
from octavo.plugins.openai.tenants.store import StoreError, connect, transaction
from tests.gateway.conftest import FakeEngine
from tests.gateway.tenants import BODY, CHAT, Clock, bearer, guarded, make, octavo
from tests.gateway.test_errors import error

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


@pytest.fixture
def alice(file: Path) -> str:
    return make(file, "alice")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def http(
    alice: str, file: Path, engine: FakeEngine, clock: Clock, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    async with guarded(file, engine, clock) as (client, _):
        yield client


def example(path: str) -> str:
    return path.replace("{id:path}", "m")


def routes() -> list[tuple[str, str]]:
    """Every one that the gateway has, with every method."""
    app = build_app(FakeEngine(), Config(), Metrics.of_run(Path("nowhere")))
    return sorted((method, route.path) for route in app.routes for method in route.methods - {"HEAD"})  # type: ignore[attr-defined]


async def test_every_route_but_the_public_ones_wants_a_key_of_its_scope(
    http: httpx.AsyncClient, file: Path, engine: FakeEngine, clock: Clock
) -> None:
    of_scope = {scope: make(file, f"only-{scope}", "--scope", scope) for scope in keys.SCOPES}
    clock.pass_(1)
    assert len(routes()) > 15
    for method, route in [*routes(), ("GET", "/nowhere"), ("GET", "/v1/models/m/more")]:
        path, body = example(route), BODY if method == "POST" else None
        if route in PUBLIC:
            assert (await http.request(method, path, json=body)).status_code in (200, 503), route
            continue
        for given in ({}, bearer(""), bearer("sk-octavo-wrong"), {"authorization": "Basic eDp5"}):
            response = await http.request(method, path, headers=given, json=body)
            error(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        seen = len(engine.seen)
        for scope, key in of_scope.items():
            response = await http.request(method, path, headers=bearer(key), json=body)
            needed = NEEDS.get(route)
            if needed is None or scope in needed | {keys.ADMIN}:
                assert response.status_code not in (401, 403), (route, scope)
            else:
                assert error(response, 403)["code"] == "missing_scope", (route, scope)
                assert len(engine.seen) == seen
            seen = len(engine.seen)


async def test_whatever_a_route_takes_for_its_path_wants_the_same_scope(
    http: httpx.AsyncClient, file: Path, engine: FakeEngine, clock: Clock
) -> None:
    of_scope = {scope: make(file, f"only-{scope}", "--scope", scope) for scope in keys.SCOPES}
    clock.pass_(1)
    for method, route in routes():
        if route in PUBLIC:
            continue
        for end in ("%0A", "%0a", "%0D%0A", "/", "/.", "%00", "%20"):
            path, body = example(route) + end, BODY if method == "POST" else None
            error(await http.request(method, path, json=body), 401)
            for scope, key in of_scope.items():
                response = await http.request(method, path, headers=bearer(key), json=body)
                if scope not in NEEDS[route] | {keys.ADMIN}:
                    assert response.status_code in (307, 403, 404), (path, scope)
    assert not engine.tenants.count("only-read")


def test_a_route_that_nobody_has_been_given_stops_the_start() -> None:
    app = build_app(FakeEngine(), Config())
    app.add_route("/new", lambda request: None, methods=["GET"])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="/new"):
        Auth(app, None, app.routes)  # type: ignore[arg-type]
    assert not PUBLIC & NEEDS.keys()


async def test_a_key_opens_its_tenant(http: httpx.AsyncClient, alice: str, engine: FakeEngine) -> None:
    """Whatever the client says: the salt of its cache is its key's tenant."""
    body = {**BODY, "user": "bob", "tenant": "bob", "cache_salt": "bob"}
    assert (await http.post(CHAT, json=body, headers=bearer(alice))).status_code == 200
    assert engine.tenants == ["alice"]


async def test_keys_come_and_go_within_a_second_while_it_runs(
    http: httpx.AsyncClient, alice: str, file: Path, engine: FakeEngine, clock: Clock
) -> None:
    assert (await http.post(CHAT, json=BODY, headers=bearer(alice))).status_code == 200
    bob = make(file, "bob", "--tenant", "works", "--scope", "admin", "--expires", "30m")
    octavo("keys", "revoke", "alice", "--file", str(file))
    clock.pass_(0.5)
    assert (await http.get("/server_info", headers=bearer(bob))).status_code == 200
    assert (await http.post(CHAT, json=BODY, headers=bearer(bob))).status_code == 200
    assert engine.tenants == ["alice", "works"]
    error(await http.post(CHAT, json=BODY, headers=bearer(alice)), 401)
    clock.pass_(1900)
    assert error(await http.post(CHAT, json=BODY, headers=bearer(bob)), 401)["code"] == "expired_api_key"


async def test_a_file_that_breaks_changes_nothing_and_another_in_its_place_is_seen(
    http: httpx.AsyncClient, alice: str, file: Path, clock: Clock, tmp_path: Path
) -> None:
    file.rename(tmp_path / "aside.db")
    for broken in (None, b"not a file of keys", b""):
        if broken is not None:
            file.write_bytes(broken)
        clock.pass_(1)
        assert (await http.post(CHAT, json=BODY, headers=bearer(alice))).status_code == 200
    file.unlink()
    carol = make(file, "carol")
    clock.pass_(1)
    assert (await http.post(CHAT, json=BODY, headers=bearer(carol))).status_code == 200
    error(await http.post(CHAT, json=BODY, headers=bearer(alice)), 401)


async def test_a_key_of_another_file_has_its_own_limits(
    file: Path, engine: FakeEngine, clock: Clock, tmp_path: Path
) -> None:
    """Though its number is that of a key of the file before."""
    limited, free = make(file, "limited", "--requests-per-minute", "1"), make(tmp_path / "other.db", "free")
    async with guarded(file, engine, clock) as (http, _):
        for status in (200, 429):
            assert (await http.post(CHAT, json=BODY, headers=bearer(limited))).status_code == status
        file.rename(tmp_path / "aside.db")
        file.with_name(f"{file.name}-wal").unlink()
        (tmp_path / "other.db").rename(file)
        clock.pass_(1)
        assert (await http.post(CHAT, json=BODY, headers=bearer(free))).status_code == 200


def test_a_file_that_is_damaged_is_said_to_be(file: Path, alice: str) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))
    with pytest.raises(StoreError, match=str(file)):
        Accounts(file)


def test_a_transaction_that_cannot_be_committed_is_none(file: Path, alice: str) -> None:
    connection = connect(file)

    def to_nobody() -> None:
        with transaction(connection):
            connection.execute("PRAGMA defer_foreign_keys = ON")
            connection.execute("UPDATE key SET tenant = 'nobody'")

    with pytest.raises(sqlite3.IntegrityError):
        to_nobody()
    keys.weigh(connection, "alice", 2.0)
    assert [key.tenant for key in keys.all_keys(connection)] == ["alice"]
    connection.close()


async def test_without_keys_an_empty_key_is_fine(engine: FakeEngine, config: Config, anyio_backend: str) -> None:
    transport = httpx.ASGITransport(build_app(engine, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.post(CHAT, json=BODY, headers=bearer(""))).status_code == 200
        assert engine.tenants == [""]
        assert "x-ratelimit-limit-requests" not in (await http.post(CHAT, json=BODY)).headers


def test_nothing_holds_a_key_and_nobody_else_reads_the_file(
    file: Path, alice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    accounts = Accounts(file)
    account = accounts.open(accounts.find(alice) or pytest.fail("it is not known"))
    account.end("finished", 1, 0, 1)
    found = [path for path in file.parent.iterdir() if path.is_file()]
    assert len(found) >= 3, "the file, its log, and a journal"
    for path in found:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
        assert alice.removeprefix(keys.PREFIX).encode() not in path.read_bytes()
    accounts.close()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert main(["keys", "list", "--file", str(file)]) == 0
    assert alice not in capsys.readouterr().out


def test_what_cannot_be_is_said(file: Path, alice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["create", "alice"], "already"),
        (["create", ""], "name"),
        (["create", "a b"], "name"),
        (["create", "a\n"], "name"),
        (["create", "x", "--scope", "root"], "infer, read, admin"),
        (["create", "x", "--requests-per-minute", "0"], "requests_per_minute"),
        (["create", "x", "--queue", "3"], "--concurrency"),
        (["create", "x", "--expires", "2020-01-01"], "past"),
        (["create", "x", "--expires", "soon"], "soon"),
        (["create", "x", "--weight", "0"], "weight"),
        (["weigh", "nobody", "2"], "nobody"),
        (["weigh", "alice", "-1"], "more than 0"),
        (["revoke", "nobody"], "octavo keys list"),
        (["import", str(tmp_path / "none.json")], "none.json"),
    ):
        assert main(["keys", *words, "--file", str(file)]) == 1, words
        assert told in capsys.readouterr().err
    connection = connect(file)
    assert [key.name for key in keys.all_keys(connection)] == ["alice"]
    connection.close()
    assert main(["keys", "list", "--file", str(tmp_path / "none.db")]) == 1
    assert "octavo keys create" in capsys.readouterr().err


def test_a_revoked_name_is_free_and_its_key_stays_known(
    file: Path, alice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    octavo("keys", "revoke", "alice", "--file", str(file))
    second = make(file, "alice", "--weight", "3")
    capsys.readouterr()
    octavo("keys", "list", "--all", "--json", "--file", str(file))
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["weight"], row["revoked"] is None) for row in rows] == [
        ("alice", 3, False),
        ("alice", 3, True),
    ]
    accounts = Accounts(file)
    assert accounts.find(alice) is None
    assert accounts.find(second) is not None
    accounts.close()


def test_a_keys_file_of_json_is_refused_with_what_to_do_and_can_be_taken_over(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = {"old": "sk-octavo-one", "boss": "sk-octavo-two"}
    digests = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in secrets.items()}
    old = tmp_path / "keys.json"
    entries: list[dict[str, Any]] = [
        {"name": "old", "sha256": digests["old"], "tenant": "works", "tokens_per_minute": 7, "created": 5},
        {"name": "boss", "sha256": digests["boss"], "tenant": "boss", "admin": True, "requests_per_minute": None},
    ]
    old.write_text(json.dumps(entries))
    with pytest.raises(StoreError, match=f"octavo keys import {old} --file {file}"):
        connect(old)
    octavo("keys", "import", str(old), "--file", str(file))
    accounts = Accounts(file)
    found = [accounts.find(secret) for secret in secrets.values()]
    assert [(key.name, key.tenant, sorted(key.scopes), key.limits.given()) for key in found if key is not None] == [
        ("old", "works", ["infer"], {"tokens_per_minute": 7}),
        ("boss", "boss", ["admin"], {}),
    ]
    accounts.close()
    assert main(["keys", "import", str(old), "--file", str(file)]) == 1, "twice is once too often"
    assert "already" in capsys.readouterr().err


def test_what_other_processes_write_is_seen_and_they_see_what_is_counted(file: Path, alice: str) -> None:
    """The last process to close a file of SQLite's removes the log beside it: it must know that the gateway lives."""
    clock = Clock()
    accounts = Accounts(file, clock, clock)
    key = accounts.find(alice)
    assert key is not None

    def command(*words: str) -> str:
        made = subprocess.run(
            [sys.executable, "-P", "-m", "octavo", *words, "--file", str(file)],
            check=True,
            capture_output=True,
            text=True,
        )
        return made.stdout.strip()

    for name in ("bob", "carol"):
        secret = command("keys", "create", name)
        clock.pass_(1.0)
        assert accounts.find(secret) is not None, name
    accounts.open(key).end("finished", 1, 0, 2)
    accounts.ledger.flush()
    assert [row["output"] for row in json.loads(command("usage", "--json"))] == [2]
    command("keys", "revoke", "alice")
    clock.pass_(1.0)
    assert accounts.find(alice) is None
    accounts.close()


def test_another_database_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE key (id)")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="no file of keys"):
        connect(other)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "server.example"])
def test_a_public_address_needs_keys(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(Config(server=ServerConfig(host=host)), tmp_path, 1)
    assert raised.value.code == CANNOT_BIND
    assert "octavo keys create" in capsys.readouterr().err
    assert unsafe(ServerConfig(host=host, keys_file="keys.db")) is None
    assert unsafe(ServerConfig(host=host, open=True)) is None
    assert unsafe(ServerConfig(host="::1")) is None
