"""A step fails, and the scheduler is killed before it can say so to anybody."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.messages import Ids, Params, Sampling
from octavo.executors.ghost import next_token, prefix_hashes
from tests.processes.daemon import Daemon, daemon
from tests.processes.failing import SIGN, environment

PROMPT = list(range(97, 117))
TOKENS = 12


def expected() -> str:
    ids, text = list(PROMPT), ""
    for _ in range(TOKENS):
        ids.append(next_token(prefix_hashes(ids)[-1], Sampling(), 0, 0))
        text += chr(ids[-1])
    return text


async def answer(service: Daemon, *, kill: bool) -> str:
    text = ""
    async with Client.connect(service.run_dir) as client, anyio.create_task_group() as tasks:
        await client.wait_ready(60)
        params = Params(max_tokens=TOKENS, sampling=Sampling())
        if kill:
            tasks.start_soon(anyio.to_thread.run_sync, lose_the_news, service)
        async with await client.generate(Ids(PROMPT), params) as stream:
            async for piece in stream:
                text += piece.text
    return text


def lose_the_news(service: Daemon) -> None:
    """Steps 1 and 2 are planned and bound; the scheduler hears nothing any more; both fail; the scheduler dies."""
    service.told("step.bound", 2)
    service.kill("scheduler", signal.SIGSTOP)
    Path(os.environ[SIGN]).touch()
    service.told("step.executed", 2)
    service.kill("scheduler")


def test_nobody_reads_what_a_step_left_whose_failure_was_lost_with_the_scheduler(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path, root).items():
        monkeypatch.setenv(name, value)
    with daemon("executor.kind=failing") as service:
        service.wait_ready()
        before = service.generations()
        with_the_kill = anyio.run(lambda: answer(service, kill=True))
        again = anyio.run(lambda: answer(service, kill=False))
        assert with_the_kill == again == expected()
        assert service.generations() == {**before, "scheduler": 2}, (
            "the executor's own check of what it reads is silent"
        )
