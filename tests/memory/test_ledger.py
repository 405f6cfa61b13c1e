"""Where an executor's memory went: the parts sum to what was measured, and a leak of blocks is found and told."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.memory import process_memory
from octavo.core.messages import Ids, Params
from octavo.core.trace.catalogue import KvLeak, MemoryMeasured, StepBound
from octavo.core.trace.read import Line
from octavo.plugins.memory.command import audit, command
from octavo.plugins.memory.ledger import Figure, ledger
from tests.processes.daemon import daemon, eventually

MIB = 2**20


def line(ts_ns: int, moment: str, resident: int, **more: Any) -> Line:
    about = {"block_bytes": MIB, "blocks": 64, "device_allocated": None, "device_reserved": None, **more}
    event = MemoryMeasured(
        moment=moment, steps=0, resident=resident * MIB, anonymous=0, file=0, peak=resident * MIB, **about
    )
    return Line(ts_ns, 0, "executor", 1, event)


def bound(ts_ns: int, free: int) -> Line:
    event = StepBound(
        step=1, allocated=0, free=free, evictable=0, evicted=0, copies=0, swapped_in=0, skipped=0, policy_ns=0
    )
    return Line(ts_ns, 0, "kv", 1, event)


def test_the_host_parts_sum_to_what_is_resident() -> None:
    run = [
        line(1, "before_load", 40, blocks=0),
        line(2, "after_load", 140),
        bound(3, 54),
        line(4, "warmed_up", 160),
        bound(5, 44),
        bound(6, 60),
        line(7, "under_load", 175),
    ]
    before, after, warm, load = ledger(run)
    assert before.host == {"runtime overhead": Figure(40 * MIB, "measured"), "total": Figure(40 * MIB, "measured")}
    assert after.host["weights"] == Figure(100 * MIB, "measured")
    assert warm.host["KV pool"] == Figure(10 * MIB, "estimated")
    assert load.host["KV pool"] == Figure(20 * MIB, "estimated")  # the most that ever was in use
    assert load.host["activations"] == Figure(15 * MIB, "estimated")
    assert load.host["workspace"].how == "unobservable"
    for column in (after, warm, load):
        sizes = [figure.size or 0 for part, figure in column.host.items() if part != "total"]
        assert sum(sizes) == column.host["total"].size
        assert column.device == {}


def test_adapters_are_no_weights_and_no_activations() -> None:
    run = [
        line(1, "before_load", 40, blocks=0),
        line(2, "after_load", 140, adapters=8 * MIB),
        line(3, "under_load", 180, adapters=28 * MIB),
    ]
    _, after, load = ledger(run)
    assert (after.host["weights"].size, after.host["adapters"].size) == (92 * MIB, 8 * MIB)
    assert (load.host["weights"].size, load.host["adapters"].size) == (92 * MIB, 28 * MIB)
    assert load.host["activations"].size == 20 * MIB
    for column in (after, load):
        sizes = [figure.size or 0 for part, figure in column.host.items() if part != "total"]
        assert sum(sizes) == column.host["total"].size


def test_a_device_is_told_apart_from_the_host() -> None:
    on = {"device_allocated": 0, "device_reserved": 0}
    run = [
        line(1, "before_load", 40, blocks=0, **on),
        line(2, "after_load", 50, device_allocated=164 * MIB, device_reserved=170 * MIB),
        line(3, "under_load", 60, device_allocated=180 * MIB, device_reserved=200 * MIB),
    ]
    load = ledger(run)[-1]
    assert {part: figure.size for part, figure in load.device.items()} == {
        "weights": 100 * MIB,
        "KV pool": 64 * MIB,
        "activations": 16 * MIB,
        "workspace": 20 * MIB,
        "runtime overhead": None,
        "total": 200 * MIB,
    }
    assert load.host["KV pool"].size == 0


def test_a_new_executor_begins_a_new_ledger() -> None:
    run = [line(1, "before_load", 1), line(2, "after_load", 2), line(3, "under_load", 3), line(4, "before_load", 5)]
    assert ledger(run) == []


def test_a_leak_is_told_with_its_dump() -> None:
    leak = KvLeak(total=9, free=3, cached=1, in_use=5, dump="block 4: 1 references counted, 0 held")
    told = audit([Line(1, 0, "kv", 1, leak)])
    assert "3 free, 1 cached and 5 in use of 9: block 4" in told
    assert "was all of them" in audit([])


def test_memory_is_flat_once_it_is_warm() -> None:
    """What hundreds of requests leave behind in any process is bounded: it is not more after three times as many."""

    async def some(count: int, first: int) -> None:
        async with Client.connect(running.run_dir) as client:
            await client.wait_ready(60)
            limit = anyio.CapacityLimiter(16)

            async def ask(i: int) -> None:
                ids = [i % 256, i // 256, *range(40)]
                async with limit, await client.generate(Ids(ids), Params(max_tokens=4)) as stream:
                    async for _ in stream:
                        pass

            async with anyio.create_task_group() as tasks:
                for i in range(first, first + count):
                    tasks.start_soon(ask, i)

    def resident() -> dict[str, int]:
        return {role: memory.anonymous for role, pid in running.pids().items() if (memory := process_memory(pid))}

    with daemon("kv.tokens=1024", "trace.enabled=false") as running:
        running.wait_ready()
        anyio.run(some, 150, 0)
        before = resident()
        anyio.run(some, 450, 150)
        grown = {role: (now - before[role]) / MIB for role, now in resident().items()}
    assert all(growth < 3 for growth in grown.values()), grown


def test_a_daemons_memory_is_shown_at_all_four_moments(capsys: pytest.CaptureFixture[str]) -> None:
    async def some() -> None:
        async with Client.connect(running.run_dir) as client:
            await client.wait_ready(60)
            async with await client.generate(Ids([1, 2, 3]), Params(max_tokens=100)) as stream:
                async for _ in stream:
                    pass

    with daemon() as running:
        running.wait_ready()
        anyio.run(some)
        eventually("memory under load", lambda: len(running.events("memory.measured")) == 4)
        assert command(run=running.run_dir) == 0
        shown = capsys.readouterr().out
    for part in ("before load", "after load", "warmed up", "under load", "weights", "scheduler", "was all of them"):
        assert part in shown
