"""What is measured of a server: each workload is one function from its port and a seed to figures.

Prompts are random ids but where it says texts, other ones for each seed, so that no prompt is in a cache that should
not be; the same seed is the same work for every server.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from octavo.core.models.locate import locate
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.plugins.quality.texts import TEXTS
from tests.peers.load import Call, Timing, call, rate, together

Figures = dict[str, float]
Workload = Callable[[int, int], Coroutine[Any, Any, Figures]]


def ids(seed: int, part: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng([seed, part]).integers(1000, 40000, n).tolist()
    return found


async def single(port: int, seed: int) -> Figures:
    """One stream of 128 tokens after 128."""
    (one,) = await together(port, [Call(ids(seed, 0, 128), 128)], 1)
    return {"tok/s": (one.tokens - 1) / (one.events[-1] - one.events[0]), "ttft s": one.ttft}


def mixed(at_once: int, requests: int = 64) -> Workload:
    """Prompts of 32 to 512 and outputs of 16 to 192 tokens."""

    async def run(port: int, seed: int) -> Figures:
        draw = np.random.default_rng([seed, 99])
        prompts, outputs = draw.integers(32, 513, requests).tolist(), draw.integers(16, 193, requests).tolist()
        calls = [Call(ids(seed, i, n), m) for i, (n, m) in enumerate(zip(prompts, outputs, strict=True))]
        found = await together(port, calls, at_once)
        return {"tok/s": rate(found), "ttft s": statistics.median(one.ttft for one in found)}

    return run


def texts(at_once: int, requests: int = 32) -> Workload:
    """The same with what people write: pieces of 64 to 256 tokens of Octavo's three texts, 32 to 160 tokens more."""

    async def run(port: int, seed: int) -> Figures:
        vocabulary = load_vocabulary(locate("default"))
        text = [token for one in TEXTS.values() for token in vocabulary.encode(one)]
        draw = np.random.default_rng([seed, 98])
        begins, prompts = draw.integers(0, len(text), requests).tolist(), draw.integers(64, 257, requests).tolist()
        outputs = draw.integers(32, 161, requests).tolist()
        calls = [
            Call(np.roll(text, -begin)[:n].tolist(), m) for begin, n, m in zip(begins, prompts, outputs, strict=True)
        ]
        found = await together(port, calls, at_once)
        return {"tok/s": rate(found), "ttft s": statistics.median(one.ttft for one in found)}

    return run


async def prefill(port: int, seed: int) -> Figures:
    """The first token after a prompt of 512: tokens a second until then."""
    found = [(await together(port, [Call(ids(seed, i, 512), 1)], 1))[0] for i in range(5)]
    return {"tok/s": 512 / statistics.median(one.ttft for one in found)}


async def shared(port: int, seed: int) -> Figures:
    """32 requests that share 1 024 tokens and have 16 of their own, all at once; then one alone, warm."""
    prefix = ids(seed, 0, 1024)
    (cold,) = await together(port, [Call([*ids(seed, 999, 1024), *ids(seed, 998, 16)], 8)], 1)
    found = await together(port, [Call([*prefix, *ids(seed, 1 + i, 16)], 16) for i in range(32)], 32)
    warm = [(await together(port, [Call([*prefix, *ids(seed, 100 + i, 16)], 8)], 1))[0] for i in range(3)]
    took = max(one.events[-1] for one in found) - min(one.sent for one in found)
    return {"all s": took, "warm/cold ttft": statistics.median(one.ttft for one in warm) / cold.ttft}


async def intruder(port: int, seed: int) -> Figures:
    """Four streams decode; a prompt of 4 096 tokens arrives."""
    begun = [asyncio.create_task(call(port, Call(ids(seed, i, 64), 256))) for i in range(4)]
    await asyncio.sleep(0.6)
    long = await call(port, Call(ids(seed, 9, 4096), 4))
    streams: list[Timing] = [await one for one in begun]
    gaps = [
        b - a
        for one in streams
        for a, b in zip(one.events, one.events[1:], strict=False)
        if b > long.sent and a < long.events[0]
    ]
    return {"worst gap s": max(gaps, default=0.0), "ttft s": long.ttft}


WORKLOADS: dict[str, Workload] = {
    "c=1, 128 in 128 out": single,
    "64 requests, c=8": mixed(8),
    "64 requests, c=32": mixed(32),
    "32 texts, c=8": texts(8),
    "prefill 512": prefill,
    "32 share 1024": shared,
    "4 streams + 4096": intruder,
}
MORE_IS_BETTER = ("tok/s",)
PAIRS = {"c=1, 128 in 128 out": 3, "prefill 512": 3}
"""Short ones are repeated within a turn."""
