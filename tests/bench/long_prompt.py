"""What a long prompt costs those who decode, by `scheduler.chunk_budget`: `python -m tests.bench.long_prompt`.

Four streams decode on the default model through HTTP; a prompt of 4 096 ids arrives. The budget is the most tokens of
a step: a small one keeps the streams' worst gap small, a large one brings the long prompt's first token (TTFT) sooner.
The daemons of all budgets are up at once and take turns, one measuring while the others rest; figures are medians of
the rounds, with quartiles. `usual` is the streams' median gap before the prompt comes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.core.rundir import read
from tests.bench.daemon_cpu import serving

STREAMS, LONG, AHEAD = 4, 4096, 24
"""`AHEAD`: tokens that every stream has before the long prompt comes."""
RESULTS = Path(__file__).parents[1] / "results" / "long_prompt.md"


class Sample(NamedTuple):
    """Milliseconds."""

    usual: float
    worst: float
    first_token: float


async def tokens(port: int, seed: int, prompt: int, most: int, seen: list[float], enough: asyncio.Event | None) -> None:
    """Take the times of a stream's tokens, until it ends."""
    ids = np.random.default_rng(seed).integers(1000, 40000, prompt).tolist()
    body = {"prompt": ids, "max_tokens": most, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}"
    head += "\r\nContent-Type: application/json"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    try:
        while piece := await reader.read(65536):
            if b"data: {" in piece:
                seen.append(time.perf_counter())
            if enough is not None and len(seen) >= AHEAD:
                enough.set()
            if b"data: [DONE]" in piece:
                return
        raise RuntimeError("a stream was cut off")
    finally:
        writer.close()


async def measure(port: int, seed: int) -> Sample:
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        seen: list[list[float]] = [[] for _ in range(STREAMS)]
        ready = [asyncio.Event() for _ in range(STREAMS)]
        streams = [tasks.create_task(tokens(port, seed * 10 + i, 128, 2000, seen[i], ready[i])) for i in range(STREAMS)]
        for event in ready:
            await event.wait()
        start = time.perf_counter()
        long: list[float] = []
        await tokens(port, seed * 10 + STREAMS, LONG, 2, long, None)
        for task in streams:
            task.cancel()
    gaps = [(a, b) for times in seen for a, b in itertools.pairwise(times)]
    usual = statistics.median(b - a for a, b in gaps if b < start)
    worst = max(b - a for a, b in gaps if b > start and a < long[0])
    return Sample(usual * 1e3, worst * 1e3, (long[0] - start) * 1e3)


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--write", action="store_true", help=f"to {RESULTS.name}")
    given = options.parse_args()
    found: dict[int, list[Sample]] = {budget: [] for budget in given.budgets}
    with contextlib.ExitStack() as stack:
        ports: dict[int, int] = {}
        for budget in given.budgets:
            info = read(stack.enter_context(serving(f"scheduler.chunk_budget={budget}")))
            assert info is not None
            assert info.address is not None
            ports[budget] = int(info.address.rpartition(":")[2])
        for turn in range(given.rounds):
            for budget, port in ports.items():
                found[budget].append(asyncio.run(measure(port, turn)))
    lines = [
        "# A long prompt among streams", "", (__doc__ or "").strip(), "",
        f"{len(os.sched_getaffinity(0))} cores, load of the machine {os.getloadavg()[0]:.1f}, {given.rounds} rounds.",
        "",
        "| chunk_budget | usual gap ms | worst gap ms | TTFT of the long prompt ms |", "|---|---|---|---|",
    ]  # fmt: skip
    for budget, samples in found.items():
        columns = (spread(list(column)) for column in zip(*samples, strict=True))
        lines.append(f"| {budget} | {' | '.join(columns)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
