"""A mixed load on a ghost daemon whose pool is too small for it, and what its client saw."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from octavo.core.client.client import Client
from octavo.core.messages import Ids, Params
from octavo.core.trace.read import lines
from tests.processes.daemon import Daemon, eventually


@dataclass
class Seen:
    """One request as its client measured it."""

    started_ns: int
    first_ns: int = 0
    ended_ns: int = 0
    tokens: int = 0
    finishes: list[str] = field(default_factory=list)


async def one(
    client: Client, name: str, ids: list[int], max_tokens: int, n: int, seen: dict[str, Seen], tenant: str = ""
) -> None:
    mine = seen[name] = Seen(time.monotonic_ns())
    params = Params(max_tokens=max_tokens, n=n)
    async with await client.generate(Ids(ids), params, request_id=name, tenant=tenant) as stream:
        async for piece in stream:
            mine.first_ns = mine.first_ns or time.monotonic_ns()
            mine.tokens += len(piece.ids)
            if piece.finish is not None:
                mine.finishes.append(piece.finish)
    mine.ended_ns = time.monotonic_ns()


async def until_tokens(seen: dict[str, Seen], name: str, count: int = 1) -> None:
    """As the client sees them: the trace has them only some time later."""
    with anyio.fail_after(60):
        while name not in seen or seen[name].tokens < count:
            await anyio.sleep(0.001)


async def _mixed(run_dir: Path, count: int, seen: dict[str, Seen]) -> None:
    """`count` requests, a few dozen at a time: short and long, some with a common beginning, some of two choices."""
    rng = random.Random(7)
    common = [rng.randrange(256) for _ in range(64)]
    async with Client.connect(run_dir) as client:
        await client.wait_ready(60)
        limit = anyio.CapacityLimiter(40)

        async def ask(name: str, ids: list[int], max_tokens: int, n: int) -> None:
            async with limit:
                await one(client, name, ids, max_tokens, n, seen)

        async with anyio.create_task_group() as tasks:
            for i in range(count):
                length = rng.choice((3, 9, 40, 300))
                own = [rng.randrange(256) for _ in range(length)]
                ids = [*common, *own] if i % 3 == 0 else own
                tasks.start_soon(ask, f"r{i}", ids, rng.choice((1, 5, 20, 40)), 2 if i % 10 == 0 else 1)


def mixed_load(running: Daemon, count: int) -> dict[str, Seen]:
    """Run it; returns when the trace has it all."""
    seen: dict[str, Seen] = {}
    running.wait_ready()
    anyio.run(_mixed, running.run_dir, count, seen)
    ends = sum(len(request.finishes) for request in seen.values())
    eventually("every end is in the trace", lambda: ended(running.run_dir) == ends)
    eventually("so is every step", running.is_written)
    return seen


def ended(run_dir: Path) -> int:
    """Choices whose end the scheduler and the tokenizer have written, and that the client has taken it."""
    names = [line["event"] for line in lines(run_dir)]
    return min(names.count(f"request.{end}") for end in ("finished", "delivered", "taken"))
