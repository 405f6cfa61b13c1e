"""The ledger: each request counts once, whatever dies; its totals are the sum of what the answers said."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from octavo.core.messages import Row
from octavo.plugins.openai.tenants import ledger as module
from octavo.plugins.openai.tenants.keys import all_keys
from octavo.plugins.openai.tenants.ledger import Entry, Ledger
from octavo.plugins.openai.tenants.store import StoreError, connect
from octavo.plugins.openai.tenants.usage import first_day, report
from tests.gateway.conftest import FakeEngine
from tests.gateway.tenants import BODY, CHAT, Clock, bearer, guarded, make, octavo

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


def only(rows: list[dict[str, Any]]) -> dict[str, Any]:
    (row,) = rows
    return row


@pytest.fixture
def alice(file: Path) -> int:
    make(file, "alice")
    connection = connect(file)
    (key,) = all_keys(connection)
    connection.close()
    return key.id


async def test_totals_are_the_sum_of_the_answers(file: Path, engine: FakeEngine) -> None:
    """Whole and streamed, of every route, with several choices and prompts."""
    key, clock, r = make(file, "alice", "--tenant", "works"), Clock(), random.Random(3)
    said: Counter[str] = Counter()
    requests = 0
    async with guarded(file, engine, clock) as (http, accounts):
        for _ in range(40):
            route = r.choice([CHAT, "/v1/completions", "/v1/responses"])
            given: dict[str, Any] = {"stream": r.random() < 0.5}
            if route == CHAT:
                given |= {**BODY, "n": r.randint(1, 3), "max_tokens": r.randint(1, 9)}
            elif route == "/v1/completions":
                prompts = ["a" * r.randint(1, 9) for _ in range(r.randint(1, 3))]
                given |= {"prompt": prompts, "n": r.randint(1, 2), "max_tokens": r.randint(0, 9)}
            else:
                given |= {"input": "hello", "max_output_tokens": r.randint(1, 9)}
            if given["stream"] and route != "/v1/responses":
                given["stream_options"] = {"include_usage": True}
            response = await http.post(route, json=given, headers=bearer(key))
            assert response.status_code == 200, response.text
            usage = usage_of(response)
            requests += 1
            prompt, output = ("input", "output") if route == "/v1/responses" else ("prompt", "completion")
            said["prompt"] += usage[f"{prompt}_tokens"]
            said["output"] += usage[f"{output}_tokens"]
            said["cached"] += usage[f"{prompt}_tokens_details"]["cached_tokens"]
        accounts.ledger.flush()
        row = only(report(file))
    assert {name: row[name] for name in ("prompt", "output", "cached")} == said
    assert (row["tenant"], row["finished"], row["cancelled"], row["refused"], row["failed"]) == (
        "works",
        requests,
        0,
        0,
        0,
    )


def usage_of(response: httpx.Response) -> dict[str, Any]:
    if "event-stream" not in response.headers["content-type"]:
        found = response.json()
    else:
        objects = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        found = objects[-1].get("response", objects[-1])
    usage: dict[str, Any] = found["usage"]
    return usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["invalid_api_key", "expired_api_key"])
async def test_an_answer_ends_with_its_key_and_what_has_come_of_it_counts(
    file: Path, engine: FakeEngine, code: str, stream: bool
) -> None:
    key, clock = make(file, "alice", "--expires", "1h"), Clock()
    engine.silent = True
    async with guarded(file, engine, clock) as (http, accounts), anyio.create_task_group() as tasks:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await http.post(CHAT, json={**BODY, "stream": stream}, headers=bearer(key)))

        tasks.start_soon(ask)
        with anyio.fail_after(5):
            while not engine.streams:
                await anyio.sleep(0.005)
        (request_id,) = engine.streams
        for i in range(3):
            engine.streams[request_id].feed(Row(request_id, 0, 0, i, [i], "a"))
        await anyio.wait_all_tasks_blocked()
        if code == "invalid_api_key":
            octavo("keys", "revoke", "alice", "--file", str(file))
        clock.pass_(1.0 if code == "invalid_api_key" else 3600.0)
        engine.streams[request_id].feed(Row(request_id, 0, 0, 3, [3], "b"))
        await engine.until(request_id)
        with anyio.fail_after(5):
            while not answers:
                await anyio.sleep(0.005)
        (answer,) = answers
        accounts.ledger.flush()
        row = only(report(file))
    assert answer.status_code == (200 if stream else 401)
    last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == code
    assert "b" not in [c["delta"].get("content") for c in chunks(answer)]
    assert (row["cancelled"], row["prompt"], row["output"]) == (1, 2, 4)


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    found = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for chunk in found for choice in chunk.get("choices", ())]


async def test_how_requests_ended(file: Path, engine: FakeEngine) -> None:
    key = make(file, "alice", "--requests-per-minute", "5")
    async with guarded(file, engine, Clock()) as (http, accounts):

        async def ask(**fields: Any) -> int:
            return (await http.post(CHAT, json={**BODY, **fields}, headers=bearer(key))).status_code

        assert await ask(temperature=9) == 400
        assert await ask(messages=[{"role": "user", "content": "x" * 300}]) == 400
        engine.error_after = 3
        assert await ask() == 500
        assert await ask(stream=True) == 200
        engine.error_after, engine.silent = None, True
        with anyio.move_on_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                while not any(engine.seen[-1][0] == request_id for request_id in engine.streams):
                    await anyio.sleep(0.002)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
        assert await ask() == 429
        accounts.ledger.flush()
        row = only(report(file))
    assert [row[name] for name in module.OUTCOMES] == [0, 1, 3, 2]
    assert row["output"] == 6, "what had come of the two that failed"
    assert row["prompt"] == 6, "and their prompts, and that of the one whose client left; none of what was refused"


async def test_a_fault_of_the_gateways_own_is_no_clients_leaving(
    file: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make(file, "alice")
    monkeypatch.setattr("octavo.plugins.openai.responses.ChatReply.whole", lambda *_: 1 / 0)
    async with guarded(file, engine, Clock()) as (http, accounts):
        http._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
        assert (await http.post(CHAT, json=BODY, headers=bearer(key))).status_code == 500
        accounts.ledger.flush()
        row = only(report(file))
    assert [row[name] for name in module.OUTCOMES] == [0, 0, 0, 1]


def test_a_key_has_days_and_a_tenant_has_keys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tenant in (("a", "one"), ("b", "one"), ("c", "two")):
        make(file, name, "--tenant", tenant)
    book = Ledger(file)
    for key, day, output in ((1, "2026-01-01", 5), (1, "2026-01-02", 7), (2, "2026-01-02", 11), (3, "2026-01-03", 13)):
        book.record(Entry(key, day, "finished", 100, 10, output))
    book.close()
    assert [(row["tenant"], row["output"]) for row in report(file)] == [("one", 23), ("two", 13)]
    assert [(row["key"], row["output"]) for row in report(file, by="key")] == [("a", 12), ("b", 11), ("c", 13)]
    assert [(row["day"][-2:], row["output"]) for row in report(file, by="day")] == [("01", 5), ("02", 18), ("03", 13)]
    assert [row["output"] for row in report(file, "one", "2026-01-02")] == [18]
    octavo("usage", "--file", str(file), "--by", "key", "--json")
    assert [row["prompt"] for row in json.loads(capsys.readouterr().out)] == [200, 100, 100]
    octavo("usage", "--file", str(file))
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ["400", "40", "36"]
    assert first_day("1d", 0.0) == "1970-01-01"
    assert first_day("2026-11-30", 0.0) == "2026-11-30"
    with pytest.raises(StoreError, match="7d"):
        first_day("yesterday", 0.0)


DIES = """
import os, signal, sys
from pathlib import Path
from octavo.plugins.openai.tenants.ledger import Entry, Ledger
book = Ledger(Path(sys.argv[1]))
for i in range(int(sys.argv[3])):
    book.record(Entry(int(sys.argv[2]), "2026-01-01", "finished", 10, 1, 2))
    if i % 50 == 20:
        book.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("count", [1, 20, 21, 150])
def test_a_gateway_that_is_killed_loses_and_doubles_nothing(file: Path, alice: int, count: int) -> None:
    """Killed before the first batch, right after one, or with some counted and some not."""
    done = subprocess.run([sys.executable, "-c", DIES, str(file), str(alice), str(count)], check=False)
    assert done.returncode == -signal.SIGKILL
    for _ in range(2):
        row = only(report(file))
        assert (row["finished"], row["prompt"], row["cached"], row["output"]) == (count, 10 * count, count, 2 * count)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_living_gateways_journal_is_left_to_it_and_a_cut_line_is_none(file: Path, alice: int) -> None:
    book = Ledger(file)
    book.record(Entry(alice, "2026-01-01", "finished", 10, 1, 2))
    other = Ledger(file)
    other.record(Entry(alice, "2026-01-01", "cancelled", 10, 1, 2))
    assert not report(file)
    other.close()
    assert only(report(file))["cancelled"] == 1
    book.close()
    assert only(report(file))["finished"] == 1
    (file.with_name(f"{file.name}-usage-dead")).write_bytes(
        b'[%d,"2026-01-01","failed",5,0,0]\n[%d,"2026-' % (alice, alice)
    )
    row = only(report(file))
    assert (row["failed"], row["finished"], row["prompt"]) == (1, 1, 25)


def test_what_cannot_be_counted_now_is_counted_later(file: Path, alice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.plugins.openai.tenants.store.BUSY_S", 0.01)
    book = Ledger(file)
    book.record(Entry(alice, "2026-01-01", "finished", 1, 0, 0))
    blocker = sqlite3.connect(file, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    book.flush()
    book.record(Entry(alice, "2026-01-01", "finished", 1, 0, 0))
    blocker.execute("ROLLBACK")
    blocker.close()
    book.flush()
    book.flush()
    assert only(report(file))["finished"] == 2
    book.close()
    assert only(report(file))["finished"] == 2


def test_a_gateway_starts_while_another_process_writes_and_what_others_left_is_counted_later(
    file: Path, alice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.plugins.openai.tenants.store.BUSY_S", 0.01)
    file.with_name(f"{file.name}-usage-dead").write_bytes(b'[%d,"2026-01-01","failed",5,0,0]\n' % alice)
    blocker = sqlite3.connect(file, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    book = Ledger(file)
    book.record(Entry(alice, "2026-01-01", "finished", 1, 0, 0))
    blocker.execute("ROLLBACK")
    blocker.close()
    book.close()
    row = only(report(file))
    assert (row["failed"], row["finished"]) == (1, 1)


def test_of_a_full_disk_only_the_cut_line_is_lost(file: Path, alice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that only when the process is killed, too."""
    book, write = Ledger(file), os.write
    for number, room in enumerate([99, 7, 0, 99, 99]):
        monkeypatch.setattr(os, "write", lambda file, data, room=room: write(file, data[:room]))
        book.record(Entry(alice, "2026-01-01", "finished", 10**number, 0, 0))
    copy = book._journal.path.read_bytes()
    book.close()
    assert only(report(file))["prompt"] == 11111
    file.with_name(f"{file.name}-usage-dead").write_bytes(copy)
    assert only(report(file))["prompt"] == 11111 + 11001


def test_a_long_journal_goes_on_when_there_is_no_room_for_another(
    file: Path, alice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST", 10)
    book = Ledger(file)

    def no_file(*_: Any, **__: Any) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(os, "open", no_file)
        for _ in range(3):
            book.record(Entry(alice, "2026-01-01", "finished", 1, 0, 0))
            book.flush()
    book.close()
    assert only(report(file))["finished"] == 3


def test_lines_that_mean_nothing_are_none_whatever_the_file_is_called(tmp_path: Path) -> None:
    file = tmp_path / "keys[1]*.db"
    make(file, "alice")
    file.with_name(f"{file.name}-usage-dead").write_bytes(
        b'[1,"2026-01-01","exploded",5,0,0]\n\n[1,"2026-01-01","failed",-5,0,0]\n\xff\n'
        b'[1,"2026-01-01","failed",99999999999999999999,0,0]\n[1,"2026-01-01","failed",5,0,0]\n'
    )
    row = only(report(file))
    assert (row["failed"], row["prompt"]) == (1, 5)


def test_a_long_journal_is_replaced_and_nothing_is_counted_twice(
    file: Path, alice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST", 500)
    book, count = Ledger(file), 2000
    book.record(Entry(alice, "2026-01-01", "finished", 1, 0, 0))
    book.flush()
    journals = {path.name for path in file.parent.glob("*-usage-*")}

    def write() -> None:
        for _ in range(count):
            book.record(Entry(alice, "2026-01-01", "finished", 1, 0, 0))

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        book.flush()
        journals |= {path.name for path in file.parent.glob("*-usage-*")}
    writer.join()
    for _ in range(3):
        book.record(Entry(alice, "2026-01-01", "finished", 1, 0, 0))
        book.flush()
        journals |= {path.name for path in file.parent.glob("*-usage-*")}
    assert len(journals) > 1
    assert len(list(file.parent.glob("*-usage-*"))) == 1
    book.close()
    assert only(report(file))["finished"] == 1 + count + 3
