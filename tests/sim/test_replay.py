"""A recorded run of the real daemon is decided again, bit for bit; another policy shows where it would differ."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import msgspec
import pytest

from octavo.core.client.client import Client
from octavo.core.client.llm import parameters
from octavo.core.control import SetPolicy
from octavo.core.messages import Role, StepPlan, StepResult, SwapPolicy, Text
from octavo.core.rundir import RunInfo, read_config
from octavo.core.supervisor.status import tell
from octavo.core.trace.record import Applied, Frame, Lost, frames, record_path
from octavo.plugins.sim.replay import replay
from octavo.plugins.sim.replay_command import DIFFERS, command, settings
from octavo.plugins.sim.traces import load
from tests.processes.daemon import daemon, eventually

ROLES = (Role.SCHEDULER, Role.KV)
REQUESTS = 16
SWAPS = {"batching": "shortest", "chunking": "fair-share", "eviction": "slru"}


async def traffic(run_dir: Path, swap: RunInfo | None = None) -> None:
    """More than fits at a time, with prompts that share a head, of two lengths. With `swap`, policies are changed when
    the first token has come."""
    first = anyio.Event()

    async def change(run: RunInfo) -> None:
        await first.wait()
        for group, policy in SWAPS.items():
            told = SetPolicy(group=group, name=policy, options={})
            assert await anyio.to_thread.run_sync(tell, run, told) is not None

    async def one(client: Client, number: int) -> None:
        prompt = Text("shared head " + "x" * (120 if number % 3 == 0 else 10) + str(number))
        params = parameters(max_tokens=20 + number, seed=number, n=1 + number % 2)
        async with await client.generate(prompt, params) as stream:
            async for _ in stream:
                first.set()

    with anyio.fail_after(60):
        async with Client.connect(run_dir) as client:
            await client.wait_ready()
            async with anyio.create_task_group() as tasks:
                if swap is not None:
                    tasks.start_soon(change, swap)
                for number in range(REQUESTS):
                    tasks.start_soon(one, client, number)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that lost its KV-manager on the way, was given other policies under load, and ended."""
    folder = tmp_path_factory.mktemp("recorded")
    with daemon("trace.record=true", "scheduler.max_sequences=6", "kv.tokens=1024") as service:
        service.wait_ready()
        anyio.run(traffic, service.run_dir)
        pid = service.kill("kv")
        service.wait_replaced("kv", pid)
        anyio.run(traffic, service.run_dir, service.info())
        eventually("all ended", lambda: len(service.events("request.delivered")) >= 2 * (REQUESTS + REQUESTS // 2))
        service.process.terminate()
        service.wait_end()
        for path in service.run_dir.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("role", ROLES)
def test_fresh_cores_give_every_recorded_answer(recorded: Path, role: Role) -> None:
    config = read_config(recorded)
    result = replay(role, frames(record_path(recorded, role)), config, config)
    assert result.same, result
    assert result.plans > 100
    assert result.cores == (2 if role is Role.KV else 1)
    bodies = [frame.body() for frame in frames(record_path(recorded, role)) if isinstance(frame, Applied)]
    at = [i for i, body in enumerate(bodies) if isinstance(body, SwapPolicy)]
    assert len(at) == (1 if role is Role.KV else 2)
    assert any(isinstance(body, StepPlan if role is Role.KV else StepResult) for body in bodies[at[-1] :])


@pytest.mark.parametrize("role", ROLES)
def test_one_flipped_bit_is_found(recorded: Path, role: Role) -> None:
    """Guards the test above: a digest speaks of what is sent."""
    config = read_config(recorded)
    told = list(frames(record_path(recorded, role)))
    at = len(told) // 2
    while not isinstance(frame := told[at], Applied):
        at += 1
    told[at] = msgspec.structs.replace(frame, digest=bytes(byte ^ 1 for byte in frame.digest))
    result = replay(role, told, config, config)
    assert result.difference is not None
    assert result.difference.recorded == []


def test_another_policy_shows_the_first_plan_that_differs(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(recorded) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert command(recorded, set_=["policies.batching=shortest"]) == DIFFERS
    out = capsys.readouterr().out
    assert re.search(r"^  [-+] .*(StepPlan|request.admitted)", out, re.MULTILINE)


def test_a_gap_in_the_recording_is_said(recorded: Path) -> None:
    config = read_config(recorded)
    told: list[Frame] = list(frames(record_path(recorded, Role.SCHEDULER)))
    told[40:50] = [Lost(10)]
    result = replay(Role.SCHEDULER, told, config, config)
    assert result.lost == 10
    assert result.messages == 39
    assert not result.same


def test_a_configuration_survives_being_said_as_settings(recorded: Path) -> None:
    from octavo.core.config.load import load as load_config

    config = read_config(recorded)
    assert load_config(None, {}, settings(config)).config == config


def test_a_run_is_a_workload(recorded: Path, tmp_path: Path) -> None:
    """With its recording the prompts are the real ones; from the trace alone at least their lengths."""
    sessions = load(recorded)
    assert len(sessions) == 2 * REQUESTS
    assert sorted(len(session.turns[0].outputs) for session in sessions) == [1] * REQUESTS + [2] * REQUESTS
    assert sessions[0].start_s == 0.0
    heads = {tuple(session.turns[0].new_ids()[:12].tolist()) for session in sessions}
    assert len(heads) == 1
    for path in recorded.glob("trace-*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    again = load(tmp_path)
    assert [(len(s.turns[0].new_ids()), s.turns[0].output) for s in again] == [
        (len(s.turns[0].new_ids()), s.turns[0].output) for s in sessions
    ]
