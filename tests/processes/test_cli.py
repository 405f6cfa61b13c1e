"""What `octavo status` and `octavo trace show` say of a real daemon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import anyio
import msgspec
import pytest

from octavo.core.client.client import Client
from octavo.core.messages import Params, Text
from octavo.core.trace.show import request_life
from tests.processes.daemon import STEP_PATH, Daemon, daemon, eventually


@pytest.fixture(scope="module")
def service() -> Iterator[Daemon]:
    with daemon(gateway=True) as service:
        service.wait_ready()
        yield service


def octavo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_status_has_a_line_for_each_actor(service: Daemon) -> None:
    told = octavo("status", "--run", str(service.run_dir))
    assert told.returncode == 0
    lines = told.stdout.splitlines()
    assert lines[0].startswith("ghost at http://127.0.0.1:")
    assert lines[0].endswith(": ready")
    assert [line.split()[0] for line in lines[2:]] == ["supervisor", *STEP_PATH, "gateway", "executor:"]


def test_status_as_json_is_a_list_of_actors(service: Daemon) -> None:
    told = octavo("status", "--json", "--run", str(service.run_dir))
    actors = msgspec.json.decode(told.stdout)
    assert {actor["role"]: actor["pid"] for actor in actors} == service.pids()
    assert all({"role", "pid", "generation", "state", "restarts", "stats"} <= set(actor) for actor in actors)


def test_status_without_a_daemon_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    told = octavo("status", "--run", str(tmp_path_factory.mktemp("none")))
    assert told.returncode == 1
    assert "no daemon runs in" in told.stderr


def test_a_requests_life_reads_in_order_and_its_times_add_up(service: Daemon) -> None:
    async def ask() -> None:
        async with Client.connect(service.run_dir) as client:
            await client.wait_ready(60)
            async with await client.generate(Text("tell"), Params(max_tokens=20), request_id="life") as stream:
                async for _ in stream:
                    pass

    anyio.run(ask)
    eventually("the trace is written", lambda: names(service) >= {"request.finished", "request.taken"})
    events = request_life(service.run_dir, "life")
    first = {event["event"]: event for event in reversed(events)}
    order = ["received", "tokenized", "queued", "matched", "admitted", "first_token", "finished"]
    times = [int(first[f"request.{name}"]["ts_ns"]) for name in order]
    assert times == sorted(times)
    token = first["request.first_token"]
    assert 0 < first["request.admitted"]["waited_ns"] <= token["since_queued_ns"]
    assert token["since_queued_ns"] <= first["request.finished"]["since_queued_ns"]
    told = octavo("trace", "show", "life", "--events", "--run", str(service.run_dir))
    assert told.returncode == 0
    assert len(told.stdout.splitlines()) == len(events)
    assert "first_token" in told.stdout


def names(service: Daemon) -> set[str]:
    return {str(event["event"]) for event in request_life(service.run_dir, "life")}
