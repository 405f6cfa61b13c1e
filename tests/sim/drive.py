"""Sends a workload to a real daemon, in real time, and measures what a simulation of it would predict."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeAlias

import anyio

from octavo.core.client.client import Client
from octavo.core.client.llm import parameters
from octavo.core.messages import Ids
from octavo.plugins.sim.workload import Session

PATIENCE_S = 240.0

Row: TypeAlias = tuple[float, float, float, int]
"""Of a request: when it was sent, when its first and its last token came (monotonic, s), and how many came."""


async def _drive(run_dir: Path, sessions: list[Session], vocab: int) -> list[Row]:
    rows: list[Row] = []

    async def one(client: Client, session: Session, began: float) -> None:
        await anyio.sleep(max(0.0, began + session.start_s - time.monotonic()))
        turn = session.turns[0]
        sent, times, tokens = time.monotonic(), [], 0
        params = parameters(temperature=0.0, max_tokens=turn.output, ignore_eos=True)
        async with await client.generate(Ids((turn.new_ids() % vocab).tolist()), params) as stream:
            async for piece in stream:
                if piece.ids:
                    times.append(time.monotonic())
                    tokens += len(piece.ids)
        rows.append((sent, times[0], times[-1], tokens))

    with anyio.fail_after(PATIENCE_S):
        async with Client.connect(run_dir) as client:
            await client.wait_ready()
            async with anyio.create_task_group() as tasks:
                began = time.monotonic()
                for session in sessions:
                    tasks.start_soon(one, client, session, began)
    return rows


def drive(run_dir: Path, sessions: list[Session], vocab: int) -> list[Row]:
    """A row per request, in the order in which they ended. Sessions of one turn."""
    return anyio.run(_drive, run_dir, sessions, vocab)
