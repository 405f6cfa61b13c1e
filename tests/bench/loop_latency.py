"""What a step costs between processes: `python -m tests.bench.loop_latency` prints a table, kept in tests/results.

A daemon on the ghost, which computes next to nothing: what is left is the kernel and its sockets. All moments come
from the trace (one monotonic clock for all processes): planned by the scheduler, bound by the KV-manager, executed,
completed in the scheduler.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import anyio

from octavo.core.client.client import Client
from octavo.core.messages import Params, Sampling, Text
from octavo.core.trace.show import lines
from tests.processes.daemon import Daemon, daemon

TOKENS = 600


async def load(running: Daemon, streams: int) -> None:
    async def one(client: Client, i: int) -> None:
        params = Params(max_tokens=TOKENS, sampling=Sampling(temperature=0))
        async with await client.generate(Text(f"stream {i}"), params) as stream:
            async for _ in stream:
                pass

    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(60)
        async with anyio.create_task_group() as tasks:
            for i in range(streams):
                tasks.start_soon(one, client, i)


def moments(run_dir: Path) -> dict[str, dict[int, int]]:
    """Event → step → ns, of the events of steps."""
    found: dict[str, dict[int, int]] = {}
    for event in lines(run_dir):
        if event["event"].startswith("step."):
            found.setdefault(event["event"], {})[event["step"]] = event["ts_ns"]
    return found


def row(depth: int, streams: int) -> str:
    with daemon(f"scheduler.depth={depth}", "kv.tokens=65536", "kv.block_size=16") as running:
        running.wait_ready()
        anyio.run(load, running, streams)
        running.process.terminate()
        running.wait_end()
        at = moments(running.run_dir)
    planned, bound, executed, completed = (at[f"step.{n}"] for n in ("planned", "bound", "executed", "completed"))
    steps = sorted(completed)[20:-20]

    def between(a: dict[int, int], b: dict[int, int]) -> float:
        return statistics.median((b[s] - a[s]) / 1000 for s in steps if s in a and s in b)

    rate = statistics.median((completed[b] - completed[a]) / 1000 for a, b in pairwise(steps))
    return (
        f"| {depth} | {streams} | {between(planned, bound):.0f} | {between(bound, executed):.0f} "
        f"| {between(executed, completed):.0f} | {between(planned, completed):.0f} | {rate:.0f} |"
    )


def main() -> None:
    text = "\n".join(
        [
            "# A step between processes",
            "",
            f"Ghost executor, {TOKENS} tokens a stream; medians in µs. A hop: a send, a wake-up, the work behind it.",
            "",
            "| depth | streams | plan → bind | bind → executed | executed → taken | whole loop | a step every |",
            "|--:|--:|--:|--:|--:|--:|--:|",
            *(row(depth, streams) for depth in (1, 2) for streams in (1, 32)),
            "",
        ]
    )
    print(text)
    (Path(__file__).parents[1] / "results" / "loop_latency.md").write_text(text)


if __name__ == "__main__":
    main()
