"""How a real daemon stops, is restarted, and gives up."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.client.stream import ServiceUnavailable, Stream
from octavo.core.messages import Params, Text
from tests.processes.daemon import STEP_PATH, Daemon, daemon, eventually, is_running

ENDLESS = Params(max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def left_alone() -> Iterator[Daemon]:
    with daemon() as service:
        service.wait_ready()
        yield service


def with_stream(service: Daemon, params: Params, use: Callable[[Client, Stream], Awaitable[None]]) -> None:
    """Run `use` with a stream that has begun."""

    async def run() -> None:
        with anyio.fail_after(60):
            async with Client.connect(service.run_dir) as client:
                await client.wait_ready()
                async with await client.generate(Text("a"), params) as stream:
                    await stream.accepted()
                    await use(client, stream)

    anyio.run(run)


def assert_clean(service: Daemon, pids: dict[str, int]) -> None:
    """No process and no socket is left, but the traces are."""
    assert not [role for role, pid in pids.items() if is_running(pid)]
    assert not [path for path in service.run_dir.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert {f"trace-{role}-0.jsonl" for role in STEP_PATH} <= {path.name for path in service.run_dir.iterdir()}


def test_sigterm_finishes_what_runs_takes_nothing_new_and_ends_with_0() -> None:
    async def drain(client: Client, stream: Stream) -> None:
        service.process.send_signal(signal.SIGTERM)
        while client.health().reason != "the service is draining":
            await anyio.sleep(0.01)
        with pytest.raises(ServiceUnavailable):
            await client.generate(Text("too late"), ENDLESS)
        text = "".join([piece.text async for piece in stream])
        assert len(text) == 500

    with daemon() as service:
        service.wait_ready()
        pids = service.pids()
        with_stream(service, Params(max_tokens=500, ignore_eos=True), drain)
        assert service.wait_end() == 0
        assert_clean(service, pids)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(sign: signal.Signals) -> None:
    async def insist(client: Client, stream: Stream) -> None:
        service.process.send_signal(sign)
        while client.health().reason != "the service is draining":
            await anyio.sleep(0.01)
        service.process.send_signal(sign)
        with pytest.raises(ServiceUnavailable):
            async for _ in stream:
                pass

    with daemon("supervisor.drain_timeout_s=1000") as service:
        service.wait_ready()
        pids = service.pids()
        with_stream(service, ENDLESS, insist)
        assert service.wait_end() == 0
        assert_clean(service, pids)


def test_restarts_beyond_the_intensity_end_the_service_with_the_cause() -> None:
    with daemon("supervisor.max_restarts=1") as service:
        service.wait_ready()
        service.wait_replaced("kv", service.kill("kv"))
        pids = service.pids()
        service.kill("kv")
        assert service.wait_end() == 1
        assert "kv" in service.log
        assert "1 restarts in 60 s are used up" in service.log
        assert_clean(service, pids)


def test_a_process_that_hangs_is_killed_and_replaced() -> None:
    with daemon("supervisor.heartbeat_timeout_s=1.5") as service:
        service.wait_ready()
        stopped = service.kill("scheduler", signal.SIGSTOP)
        service.wait_replaced("scheduler", stopped)
        (stalled,) = service.told("actor.stalled")
        assert stalled["actor"] == "scheduler"
        assert "silent" in str(stalled["why"])
        assert {event["actor"] for event in service.told("actor.restarted")} == {"scheduler"}


def test_a_model_that_is_not_there_ends_the_start_and_is_named() -> None:
    """The executor does not care, but the tokenizer does."""
    with daemon("executor.kind=ghost", model="/no/such/model") as service:
        assert service.wait_end() == 1
        assert "/no/such/model" in service.log
        assert "restarting" not in service.log
        assert "Traceback" not in service.log


def test_a_port_in_use_ends_the_start_and_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with daemon(gateway=True, port=port) as service:
            assert service.wait_end() == 1
            assert str(port) in service.log


def test_a_run_folder_in_use_is_refused_and_its_daemon_left_alone(left_alone: Daemon) -> None:
    with daemon(f"run_dir={left_alone.run_dir}") as second:
        assert second.wait_end() == 1
        assert f"pid {left_alone.process.pid}" in second.log
    assert left_alone.wait_ready()


def test_the_run_folder_is_private(left_alone: Daemon) -> None:
    assert stat.S_IMODE(left_alone.run_dir.stat().st_mode) == 0o700
    for path in left_alone.run_dir.iterdir():
        assert stat.S_ISSOCK(path.stat().st_mode) or stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_uid == os.getuid()
    eventually("a trace of the start", lambda: left_alone.events("actor.ready"))
