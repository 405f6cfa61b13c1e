"""kill -9 of each process of a real daemon on the ghost, idle and under streams."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.messages import Params, Sampling, Text
from tests.processes.daemon import STEP_PATH, Daemon, daemon, eventually, is_running

BUMPED = {
    "executor": {"executor", "kv"},
    "kv": {"kv"},
    "scheduler": {"scheduler"},
    "tokenizer": {"tokenizer"},
    "gateway": {"gateway"},
}

LONG = 300
"""Output tokens: enough for a kill to come in the middle."""


@pytest.fixture(scope="module")
def service() -> Iterator[Daemon]:
    sets = "supervisor.max_restarts=100", "supervisor.client_timeout_s=3", "scheduler.tell_every_ms=20"
    with daemon(*sets, gateway=True) as service:
        service.wait_ready()
        yield service


async def answer(client: Client, seed: int, started: anyio.Event | None = None, tokens: int = LONG) -> dict[int, str]:
    """The text of each choice; greedy for an even seed, two choices for every third."""
    sampling = Sampling(temperature=float(seed % 2), seed=seed)
    params = Params(max_tokens=tokens, n=2 if seed % 3 == 0 else 1, sampling=sampling)
    texts: dict[int, str] = {}
    async with await client.generate(Text(f"prompt {seed} " * 5), params) as stream:
        async for piece in stream:
            texts[piece.choice] = texts.get(piece.choice, "") + piece.text
            if started is not None and len(texts[0]) > 10 * (seed + 1):
                started.set()
    return texts


async def answers(client: Client, seeds: range, kill: str | None, service: Daemon) -> dict[int, dict[int, str]]:
    """Of several streams at once; `kill` an actor when one of them (drawn) has begun."""
    got: dict[int, dict[int, str]] = {}
    trigger = anyio.Event()
    drawn = random.Random(kill).choice(seeds)

    async def one(seed: int) -> None:
        got[seed] = await answer(client, seed, trigger if seed == drawn else None)

    with anyio.fail_after(90):
        async with anyio.create_task_group() as tasks:
            for seed in seeds:
                tasks.start_soon(one, seed)
            if kill is not None:
                await trigger.wait()
                service.kill(kill)
    return got


def test_there_are_six_processes_and_no_two_are_the_same(service: Daemon) -> None:
    pids = service.pids()
    assert set(pids) == {"supervisor", "gateway", *STEP_PATH}
    assert len(set(pids.values())) == 6
    assert all(map(is_running, pids.values()))
    titles = {role: Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode() for role, pid in pids.items()}
    assert titles == {role: f"octavo: {role}" for role in pids}


@pytest.mark.parametrize("role", [*STEP_PATH, "gateway"])
def test_a_killed_process_is_replaced_and_only_the_state_that_it_held_is_new(service: Daemon, role: str) -> None:
    before, pids = service.generations(), service.pids()
    service.wait_replaced(role, service.kill(role))
    after = service.generations()
    assert {name for name in after if after[name] == before[name] + 1} == BUMPED[role]
    assert {name for name in after if after[name] != before[name]} == BUMPED[role]
    assert {name for name, pid in service.pids().items() if pid != pids[name]} == {role}


@pytest.mark.parametrize("role", STEP_PATH)
def test_streams_go_on_to_the_same_text_after_a_kill(service: Daemon, role: str) -> None:
    async def both() -> None:
        async with Client.connect(service.run_dir) as client:
            await client.wait_ready(60)
            undisturbed = await answers(client, range(4), None, service)
            assert await answers(client, range(4), role, service) == undisturbed

    pid = service.pids()[role]
    anyio.run(both)
    service.wait_replaced(role, pid)
    eventually("nothing is left running", lambda: idle(service))


def idle(service: Daemon) -> bool:
    """Every count of what is under way, and of blocks in use, is 0."""
    actors = service.actors()
    counts = {"scheduler": ("running", "waiting", "requests"), "kv": ("used_blocks",), "tokenizer": ("live",)}
    return all(actors[role].stats.get(key) == 0 for role, keys in counts.items() for key in keys)


VANISH = """
import os, signal, sys
from pathlib import Path
import anyio
from octavo.core.client.client import Client
from octavo.core.messages import Params, Text

async def main():
    async with Client.connect(Path(sys.argv[1])) as client:
        await client.wait_ready(60)
        # Four that do not fit side by side: while one waits another is decoded step by step, for long enough.
        params = Params(max_tokens=4000, n=4)
        async with await client.generate(Text("left behind"), params, request_id="orphan") as stream:
            async for piece in stream:
                os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def test_the_requests_of_a_client_that_is_killed_are_cancelled(service: Daemon) -> None:
    client = subprocess.run([sys.executable, "-c", VANISH, service.run_dir], timeout=60, check=False)
    assert client.returncode == -signal.SIGKILL

    def cancelled() -> bool:
        return any(event["request_id"] == "orphan" for event in service.events("request.cancelled"))

    eventually("the request is cancelled", cancelled)
    eventually("nothing is left running", lambda: idle(service))


def test_when_the_supervisor_is_killed_no_process_is_left() -> None:
    with daemon(gateway=True) as service:
        service.wait_ready()
        pids = service.pids()
        service.process.send_signal(signal.SIGKILL)
        service.wait_end()
        eventually("all have ended", lambda: not any(map(is_running, pids.values())))


def test_when_the_supervisor_is_killed_while_actors_start_no_process_is_left() -> None:
    with daemon() as service:
        eventually("processes", lambda: len(service.pids()) > len(STEP_PATH))
        pids = service.pids()
        service.process.send_signal(signal.SIGKILL)
        service.wait_end()
        eventually("all have ended", lambda: not any(map(is_running, pids.values())))
