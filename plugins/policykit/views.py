"""The views that the kit shows to policies: ordinary ones, and the ones at which policies break.

Views look as the kernel makes them: read-only columns of the contract's types, oldest arrival first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.policies.contract import NEVER, Ints, Leaves, Observed, Running, Step, Times, Waiting

SECOND = 1_000_000_000
BLOCK_SIZE = 16
WINDOW = 256
TENANTS = ("", "ada", "bob")


@dataclass(frozen=True)
class Scene:
    """A name for messages, and what the policy is shown."""

    name: str
    step: Step
    waiting: Waiting
    running: Running


def scenes() -> list[Scene]:
    """In this order they are one short life: the policy is shown all of them one after the other."""
    full = scene("an ordinary step", 20, 12)
    return [
        scene("nobody waits and nobody runs", 0, 0),
        scene("one waits", 1, 0),
        scene("one runs", 0, 1),
        full,
        scene("the window is full", WINDOW, 64),
        replace(full, name="no credit", step=replace(full.step, credit=0)),
        replace(full, name="no free slot", step=replace(full.step, free_slots=0)),
        replace(full, name="no budget left for prompts", step=replace(full.step, chunk_budget=12)),
        scene("all are equal in everything", 20, 12, equal=True),
        scene("the longest and the shortest there can be", 20, 12, extreme=True),
        replace(full, name="the clock jumps an hour ahead", step=replace(full.step, now_ns=3600 * SECOND, step=99)),
        replace(full, name="the clock stands at zero", step=replace(full.step, now_ns=0, step=100)),
        scene("a thousand run", WINDOW, 1024),
        scene("nobody waits and nobody runs any more", 0, 0),
    ]


def scene(name: str, waiting: int, running: int, *, equal: bool = False, extreme: bool = False) -> Scene:
    now_ns = 100 * SECOND
    step = Step(now_ns, 1000 + waiting + running, 8, 400, 2048, BLOCK_SIZE, TENANTS, seed=7)
    draw = np.random.default_rng(waiting * 4099 + running)
    return Scene(
        name, step, _waiting(draw, waiting, now_ns, equal, extreme), _running(draw, running, now_ns, equal, extreme)
    )


def _waiting(draw: np.random.Generator, n: int, now_ns: int, equal: bool, extreme: bool) -> Waiting:
    known = _lengths(draw, n, equal, extreme)
    return Waiting(
        arrival_ns=_arrivals(draw, n, now_ns, equal),
        known=known,
        cached=_ints(np.zeros(n) if equal else draw.integers(0, known // BLOCK_SIZE + 1) * BLOCK_SIZE // 2),
        output_left=_lengths(draw, n, equal, extreme),
        priority=_priorities(draw, n, equal, extreme),
        deadline_ns=_deadlines(draw, n, now_ns, equal),
        tenant=_ints(np.zeros(n) if equal else draw.integers(0, len(TENANTS), n)),
        preemptions=_ints(np.zeros(n) if equal else draw.integers(0, 3, n)),
    )


def _running(draw: np.random.Generator, n: int, now_ns: int, equal: bool, extreme: bool) -> Running:
    known = _lengths(draw, n, equal, extreme)
    decoding = np.ones(n, dtype=np.bool_) if equal else draw.random(n) < 0.7
    planned = np.where(decoding, known - 1, known // 2)
    decoding.flags.writeable = False
    return Running(
        arrival_ns=_arrivals(draw, n, now_ns, equal),
        known=known,
        planned=_ints(planned),
        prompt=_ints(np.maximum(1, known // 2)),
        output_left=_lengths(draw, n, equal, extreme),
        priority=_priorities(draw, n, equal, extreme),
        deadline_ns=_deadlines(draw, n, now_ns, equal),
        tenant=_ints(np.zeros(n) if equal else draw.integers(0, len(TENANTS), n)),
        preemptions=_ints(np.zeros(n) if equal else draw.integers(0, 3, n)),
        blocks=_ints(planned // BLOCK_SIZE + 1),
        decoding=decoding,
        cached=_ints(planned // 3),
        judged=_ints(known % 50),
        right=_ints(known % 50 // 2),
    )


def leaves() -> list[tuple[str, int, Leaves]]:
    """(name, need, leaves)."""
    return [
        ("one leaf", 1, some_leaves(1)),
        ("an ordinary eviction", 10, some_leaves(50)),
        ("all leaves are equal", 5, some_leaves(50, equal=True)),
        ("everything has to go", 50, some_leaves(50)),
        ("four thousand leaves", 100, some_leaves(4096)),
    ]


def some_leaves(n: int, *, equal: bool = False) -> Leaves:
    draw = np.random.default_rng(n)
    now_ns = 100 * SECOND
    last_used = draw.permutation(n).astype(np.int64) + 1
    tenant = _ints(np.zeros(n) if equal else draw.integers(0, 3, n))
    return Leaves(
        last_used_ns=_times(np.full(n, now_ns) if equal else last_used * (now_ns // (n + 1))),
        last_used=_times(np.ones(n) if equal else last_used),
        hits=_ints(np.zeros(n) if equal else draw.integers(0, 5, n)),
        depth=_ints(np.zeros(n) if equal else draw.integers(0, 200, n)),
        tenant=tenant,
        held=_ints(np.bincount(tenant, minlength=3)),
        now_ns=now_ns,
        tenants=("ada", "bob", "cyd"),
    )


def splits() -> list[tuple[str, Step, Ints, int]]:
    """(name, step, remaining, decode tokens)."""
    step = scene("", 0, 0).step
    shapes: list[tuple[str, list[int], int, int]] = [
        ("no prefill", [], 2048, 4),
        ("one short prefill", [5], 2048, 0),
        ("one longer than the budget", [100_000], 2048, 8),
        ("many equal ones", [100] * 40, 2048, 16),
        ("long and short", [1, 100_000, 3, 50, 2047, 1], 2048, 7),
        ("the decodes leave nothing", [10, 20], 64, 64),
        ("the decodes leave one token", [10, 20], 65, 64),
        ("a budget of one token", [10], 1, 0),
        ("as many as there may be", [700] * 256, 2048, 256),
    ]
    return [(name, replace(step, chunk_budget=budget), _ints(left), decodes) for name, left, budget, decodes in shapes]


def observed() -> list[Observed]:
    """What policies may be told: an ordinary piece, nothing but a step, nothing but ends, and long steps."""
    return [
        _observed([5_000_000, 7_000_000], [0, 512], [3, 4], [6, 0], [4, 0], [(0, 10, 5), (2, 700, 90)]),
        _observed([1_000_000], [0], [0], [0], [0], []),
        _observed([], [], [], [], [], [(1, 1, 1)]),
        _observed([0, 3600 * SECOND], [16, 16], [1, 1], [0, 0], [0, 0], []),
    ]


def _observed(
    ns: list[int], prefill: list[int], decodes: list[int], drafted: list[int], accepted: list[int], ends: list[Any]
) -> Observed:
    tenants, prompts, outputs = zip(*ends, strict=True) if ends else ((), (), ())
    return Observed(
        now_ns=100 * SECOND,
        duration_ns=_times(ns),
        prefill_tokens=_ints(prefill),
        decodes=_ints(decodes),
        drafted=_ints(drafted),
        accepted=_ints(accepted),
        tenant_prefill=_times([sum(prefill), 0, 7]),
        tenant_output=_times([3, 9, 0]),
        tenant=_ints(tenants),
        prompt=_ints(prompts),
        output=_ints(outputs),
        preemptions=_ints([0] * len(ends)),
        ttft_ns=_times([SECOND] * len(ends)),
        total_ns=_times([2 * SECOND] * len(ends)),
        depth=_ints([-(-n // 2) for n in drafted]),
        asked=_ints([n + 1 for n in drafted]),
        rounds=_ints([1 if chunk or n else 8 for chunk, n in zip(prefill, drafted, strict=True)]),
    )


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


def _lengths(draw: np.random.Generator, n: int, equal: bool, extreme: bool) -> Ints:
    if equal:
        return _ints(np.full(n, 64))
    return _ints(np.where(draw.random(n) < 0.5, 1, 2**20) if extreme else draw.integers(2, 2000, n))


def _priorities(draw: np.random.Generator, n: int, equal: bool, extreme: bool) -> Ints:
    if equal:
        return _ints(np.zeros(n))
    return _ints(draw.choice([-(2**31), 0, 2**31 - 1], n) if extreme else draw.integers(-2, 3, n))


def _arrivals(draw: np.random.Generator, n: int, now_ns: int, equal: bool) -> Times:
    return _times(np.full(n, now_ns // 2) if equal else np.sort(draw.integers(0, now_ns, n)))


def _deadlines(draw: np.random.Generator, n: int, now_ns: int, equal: bool) -> Times:
    near = draw.integers(now_ns - SECOND, now_ns + 20 * SECOND, n)
    return _times(np.full(n, NEVER) if equal else np.where(draw.random(n) < 0.5, near, NEVER))


def _ints(values: Any) -> Ints:
    column = np.asarray(values).astype(np.int32)
    column.flags.writeable = False
    return column


def _times(values: Any) -> Times:
    column = np.asarray(values).astype(np.int64)
    column.flags.writeable = False
    return column
