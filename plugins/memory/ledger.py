"""What an executor's memory was used for, at four moments of its life.

Some of it is measured, some follows from other figures (estimated), and some nobody can see from here:

    host     total               measured: what is resident
             runtime overhead    measured: what was resident before anything was loaded
             weights             measured: what loading added, less the adapters
             adapters            computed: LoRA adapters as they are held
             KV pool             estimated: pages are taken when they are first written, so the blocks ever in use
             activations         estimated: what is left, with what the libraries keep for themselves (workspace) and
                                 what a drafter remembers
             workspace           unobservable: libraries do not say
    device   total               measured: what torch's allocator holds
             KV pool             computed: the pool is taken at once
             weights             measured: what loading added, less the pool
             activations         measured: what tensors hold beyond that
             workspace           measured: held, and not in a tensor

Pure: events in, rows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.trace.catalogue import MemoryMeasured, StepBound
from octavo.core.trace.read import Line

MOMENTS = ("before_load", "after_load", "warmed_up", "under_load")
PARTS = ("weights", "adapters", "KV pool", "activations", "workspace", "runtime overhead", "total")


class Figure(NamedTuple):
    """Bytes; None where it is not known. `how`: measured, estimated, unobservable, or "" for not there yet."""

    size: int | None
    how: str


class Column(NamedTuple):
    moment: str
    host: dict[str, Figure]
    device: dict[str, Figure]
    """Empty without a device."""
    peak: int


NOTHING = Figure(0, "measured")
UNSEEN = Figure(None, "unobservable")
LATER = Figure(None, "")


def ledger(lines: Sequence[Line]) -> list[Column]:
    """The four moments of the last executor that a run had, as far as it came."""
    latest: dict[str, tuple[int, MemoryMeasured]] = {}
    for line in lines:
        if isinstance(line.event, MemoryMeasured):
            if line.event.moment == "before_load":
                latest = {}
            latest[line.event.moment] = (line.ts_ns, line.event)
    if not {"before_load", "after_load"} <= latest.keys():
        return []
    before, after = latest["before_load"][1], latest["after_load"][1]
    columns = []
    for moment in MOMENTS:
        if moment in latest:
            at_ns, now = latest[moment]
            blocks = _most_in_use(lines, at_ns, now.blocks) if moment in ("warmed_up", "under_load") else 0
            columns.append(Column(moment, _host(before, after, now, blocks), _device(before, after, now), now.peak))
    return columns


def _most_in_use(lines: Sequence[Line], until_ns: int, blocks: int) -> int:
    """Blocks that were ever given out by then: the pool gives out the same ones again, before others."""
    free = [line.event.free for line in lines if isinstance(line.event, StepBound) and line.ts_ns <= until_ns]
    return blocks - min(free, default=blocks)


def _host(before: MemoryMeasured, after: MemoryMeasured, now: MemoryMeasured, blocks: int) -> dict[str, Figure]:
    total, overhead = Figure(now.resident, "measured"), Figure(before.resident, "measured")
    if now.moment == "before_load":
        return {"runtime overhead": overhead, "total": total}
    weights = after.resident - before.resident - after.adapters
    on_device = after.device_reserved is not None
    pool = 0 if on_device else min(blocks, now.blocks) * now.block_bytes
    rest = max(0, now.resident - after.resident - pool - (now.adapters - after.adapters))
    return {
        "weights": Figure(weights, "measured"),
        "adapters": Figure(now.adapters, "measured"),
        "KV pool": NOTHING if on_device else Figure(pool, "estimated"),
        "activations": LATER if now.moment == "after_load" else Figure(rest, "estimated"),
        "workspace": LATER if now.moment == "after_load" else UNSEEN,
        "runtime overhead": overhead,
        "total": total,
    }


def _device(before: MemoryMeasured, after: MemoryMeasured, now: MemoryMeasured) -> dict[str, Figure]:
    if now.device_reserved is None or now.device_allocated is None or after.device_allocated is None:
        return {}
    if now.moment == "before_load":
        return {"total": Figure(now.device_reserved, "measured")}
    pool = now.blocks * now.block_bytes
    return {
        "weights": Figure(max(0, after.device_allocated - (before.device_allocated or 0) - pool), "measured"),
        "KV pool": Figure(pool, "measured"),
        "activations": Figure(max(0, now.device_allocated - after.device_allocated), "measured"),
        "workspace": Figure(now.device_reserved - now.device_allocated, "measured"),
        "runtime overhead": UNSEEN,
        "total": Figure(now.device_reserved, "measured"),
    }
