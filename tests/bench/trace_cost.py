"""What tracing costs: the throughput of a ghost daemon with everything traced against nothing traced.

    python -m tests.bench.trace_cost [--pairs 10] [--requests 200]

Pairs of runs, one with and one without, in an order that alternates: what else the machine does falls on both. Prints
the median cost and its upper 95 % bound (a bootstrap over the pairs), in throughput and in processor time of the
actors per token; the latter says something on a busy machine, too. The ghost computes nothing, so that a step here is
all kernel and no model: with a model that takes its time, the same cost is a smaller part.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
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


async def _load(running: Daemon, requests: int) -> float:
    """Output tokens per second."""
    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(60)
        limit = anyio.CapacityLimiter(AT_ONCE)

        async def ask(i: int) -> None:
            ids = [i % 256, i // 256 % 256, *range(30)]
            async with limit, await client.generate(Ids(ids), Params(max_tokens=OUTPUT)) as stream:
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


def measure(requests: int, *, traced: bool) -> Rate:
    sets = f"trace.enabled={str(traced).lower()}"
    with daemon(sets, "kv.tokens=16384", "kv.block_size=16", "scheduler.max_sequences=64") as running:
        running.wait_ready()
        anyio.run(_load, running, AT_ONCE)
        before = cpu_s(running)
        rate = anyio.run(_load, running, requests)
        return Rate(rate, (cpu_s(running) - before) * 1e6 / (requests * OUTPUT))


def upper_bound(costs: list[float]) -> float:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(costs, k=len(costs))) for _ in range(RESAMPLES))
    return medians[int(0.95 * RESAMPLES)]


def told(what: str, costs: list[float]) -> str:
    return (
        f"cost of tracing in {what}: median {statistics.median(costs):+.2%}, at most {upper_bound(costs):+.2%} (95 %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200)
    arguments = parser.parse_args()
    throughput, processor = [], []
    for pair in range(arguments.pairs):
        rates: dict[bool, Rate] = {}
        for traced in (True, False) if pair % 2 else (False, True):
            rates[traced] = measure(arguments.requests, traced=traced)
        on, off = rates[True], rates[False]
        throughput.append(1 - on.tokens_per_s / off.tokens_per_s)
        processor.append(on.cpu_us_per_token / off.cpu_us_per_token - 1)
        print(
            f"pair {pair}: {on.tokens_per_s:.0f} tok/s and {on.cpu_us_per_token:.0f} us/token traced, "
            f"{off.tokens_per_s:.0f} and {off.cpu_us_per_token:.0f} not"
        )
    said = [told("throughput", throughput), told("processor time", processor)]
    print("\n".join(said))
    RESULT.write_text(
        "# What tracing costs\n\n"
        f"Written by `python -m tests.bench.trace_cost --pairs {arguments.pairs} --requests {arguments.requests}`: a "
        "ghost daemon, whose steps are all kernel and no model, with every event against none, interleaved.\n\n"
        + "\n".join(f"- {line}" for line in said)
        + f"\n\nLoad of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.\n"
    )


if __name__ == "__main__":
    main()
