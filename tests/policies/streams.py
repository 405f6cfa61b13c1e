"""Streams of a ghost daemon, all at once, and what came of them."""

from __future__ import annotations

from pathlib import Path

import anyio

from octavo.core.client.client import Client
from octavo.core.messages import Params, Sampling, Text

STREAMS = 8
TOKENS = 120


async def answers(run_dir: Path, streams: int = STREAMS, tokens: int = TOKENS) -> dict[int, str]:
    """The text of each; greedy, so it depends on the prompt alone."""
    got = dict.fromkeys(range(streams), "")

    async def one(client: Client, seed: int) -> None:
        params = Params(max_tokens=tokens, sampling=Sampling(temperature=0.0))
        async with await client.generate(Text(f"prompt {seed}"), params, tenant=f"t{seed % 2}") as stream:
            async for piece in stream:
                got[seed] += piece.text

    with anyio.fail_after(90):
        async with Client.connect(run_dir) as client, anyio.create_task_group() as group:
            await client.wait_ready(60)
            for seed in range(streams):
                group.start_soon(one, client, seed)
    return got
