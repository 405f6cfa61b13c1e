"""What tracing costs: the throughput of a daemon with everything traced against nothing traced.

    python -m tests.bench.trace_cost [--pairs 10] [--requests 200] [--native-requests 16]

Pairs of runs, one with and one without, in an order that alternates: what else the machine does falls on both. Prints
the median cost and its upper 95 % bound (a bootstrap over the pairs), in throughput and in processor time of the
actors per token; the latter says something on a busy machine, too. First with the default model on the native executor,
which is what a user sees; then on the ghost, which computes nothing: a step there is all kernel and no model.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import anyio

from octavo.core.client.client import Client
from octavo.core.messages import Ids, Params
from tests.processes.daemon import Daemon, daemon

RESULT = Path(__file__).parents[1] / "results/trace_cost.md"
AT_ONCE = 32
OUTPUT = 64
RESAMPLES = 4000


class Served(NamedTuple):
    """What is served, and under how many requests at once."""

    title: str
    model: str
    at_once: int
    sets: tuple[str, ...]


NATIVE = Served(
    "The default model, native executor", "default", 8, ("executor.kind=native", "scheduler.chunk_budget=512")
)
GHOST = Served("The ghost", "ghost", AT_ONCE, ())


async def _load(running: Daemon, requests: int, at_once: int) -> float:
    """Output tokens per second."""
    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(60)
        limit = anyio.CapacityLimiter(at_once)

        async def ask(i: int) -> None:
            ids = [i % 256, i // 256 % 256, *range(30)]
            async with limit, await client.generate(Ids(ids), Params(max_tokens=OUTPUT, ignore_eos=True)) as stream:
                async for _ in stream:
                    pass

        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for i in range(requests):
                tasks.start_soon(ask, i)
        return requests * OUTPUT / (time.perf_counter() - started)


class Rate(NamedTuple):
    tokens_per_s: float
    cpu_us_per_token: float


def cpu_s(running: Daemon) -> float:
    """Processor time of all actors so far."""
    ticks = 0
    for pid in running.pids().values():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(served: Served, requests: int, *, traced: bool) -> Rate:
    sets = (f"trace.enabled={str(traced).lower()}", "kv.tokens=16384", "kv.block_size=16", "scheduler.max_sequences=64")
    with daemon(*sets, *served.sets, model=served.model) as running:
        running.wait_ready()
        anyio.run(_load, running, served.at_once, served.at_once)
        before = cpu_s(running)
        rate = anyio.run(_load, running, requests, served.at_once)
        return Rate(rate, (cpu_s(running) - before) * 1e6 / (requests * OUTPUT))


def upper_bound(costs: list[float]) -> float:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(costs, k=len(costs))) for _ in range(RESAMPLES))
    return medians[int(0.95 * RESAMPLES)]


def told(what: str, costs: list[float]) -> str:
    return (
        f"cost of tracing in {what}: median {statistics.median(costs):+.2%}, at most {upper_bound(costs):+.2%} (95 %)"
    )


def compare(served: Served, pairs: int, requests: int) -> list[str]:
    """A section of the result."""
    throughput, processor = [], []
    for pair in range(pairs):
        rates: dict[bool, Rate] = {}
        for traced in (True, False) if pair % 2 else (False, True):
            rates[traced] = measure(served, requests, traced=traced)
        on, off = rates[True], rates[False]
        throughput.append(1 - on.tokens_per_s / off.tokens_per_s)
        processor.append(on.cpu_us_per_token / off.cpu_us_per_token - 1)
        print(
            f"{served.model}, pair {pair}: {on.tokens_per_s:.0f} tok/s and {on.cpu_us_per_token:.0f} us/token traced, "
            f"{off.tokens_per_s:.0f} and {off.cpu_us_per_token:.0f} not"
        )
    said = [told("throughput", throughput), told("processor time", processor)]
    print("\n".join(said))
    about = f"{pairs} pairs of {requests} requests, {served.at_once} at once, {OUTPUT} tokens each."
    load = f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors."
    return [f"## {served.title}", "", f"{about} {load}", "", *(f"- {line}" for line in said), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200, help="on the ghost; 0 leaves it out")
    parser.add_argument("--native-requests", type=int, default=16, help="of the default model; 0 leaves it out")
    arguments = parser.parse_args()
    command = " ".join(["python -m tests.bench.trace_cost", *sys.argv[1:]])
    lines = ["# What tracing costs", "", f"Written by `{command}`: every event against none, interleaved.", ""]
    for served, requests in ((NATIVE, arguments.native_requests), (GHOST, arguments.requests)):
        if requests:
            lines += compare(served, arguments.pairs, requests)
    RESULT.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
