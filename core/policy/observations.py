"""Gathers what policies are told of: steps and their times, what tenants got, who finished. See `Observed`.

Nothing is gathered while nobody wants to know (`on`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.core.messages import Col, Kind, StepPlan, StepResult
from octavo.policies.contract import Ints, Observed, Times


class _Made(NamedTuple):
    """A plan under way, or with its result."""

    plan: StepPlan
    tenants: Ints
    """Of its items."""
    result: StepResult | None = None
    duration_ns: int = 0


class _StepRow(NamedTuple):
    duration_ns: int
    prefill_tokens: int
    decodes: int
    drafted: int
    accepted: int
    depth: int
    asked: int
    rounds: int


class _EndRow(NamedTuple):
    tenant: int
    prompt: int
    output: int
    preemptions: int
    ttft_ns: int
    total_ns: int


_TOGETHER = 8
"""So many steps of decodes alone, without guesses, are told together: to tell of each takes longer than it is worth."""


class Observations:
    def __init__(self) -> None:
        self.on = False
        self._made: dict[int, _Made] = {}
        self._last_result_ns = 0
        self._steps: list[_Made] = []
        """Those with results, in their order."""
        self._due = False
        """Whether one of them is worth telling of at once."""
        self._ends: list[_EndRow] = []

    def planned(self, plan: StepPlan, tenants: Ints) -> None:
        """A plan goes out; `tenants` are those of all slots."""
        if self.on:
            self._made[plan.step] = _Made(plan, tenants[plan.slot])

    def completed(self, now_ns: int, result: StepResult) -> None:
        made = self._made.pop(result.step, None)
        began_ns, self._last_result_ns = self._last_result_ns, now_ns
        if made is not None:
            plan = made.plan
            took_ns = now_ns - max(plan.now_ns, began_ns)
            self._steps.append(made._replace(result=result, duration_ns=took_ns // result.rounds))
            self._due |= plan.rounds == 1 and int(plan.n.sum()) > len(plan.n)

    def finished(self, *, tenant: int, prompt: int, output: int, preemptions: int, ttft_ns: int, total_ns: int) -> None:
        """A sequence ended with an answer."""
        if self.on:
            self._ends.append(_EndRow(tenant, prompt, output, preemptions, ttft_ns, total_ns))

    def lost(self) -> None:
        """Nothing that was planned counts any more."""
        self._made.clear()

    def take(self, now_ns: int) -> Observed | None:
        """All since the last that was told, or None if there is nothing to tell that could not wait for more."""
        if not self._due and not self._ends and len(self._steps) < _TOGETHER:
            return None
        rows, chunks, said = zip(*map(_seen, self._steps), strict=True) if self._steps else ((), (), ())
        output = _by_tenant(said, 0)
        by_tenant = _by_tenant([chunk for chunk in chunks if chunk is not None], len(output)), output
        for column in by_tenant:
            column.flags.writeable = False
        step_ns, steps = _columns(rows, len(_StepRow._fields))
        end_ns, ends = _columns(self._ends, len(_EndRow._fields)) if self._ends else _NO_ENDS
        columns = (step_ns[0], *steps[1:5], *by_tenant, *ends[:4], *end_ns[4:], *steps[5:])
        self._steps, self._ends, self._due = [], [], False
        return Observed(now_ns, *columns)


def _seen(made: _Made) -> tuple[_StepRow, tuple[Col, Col] | None, tuple[Col, Col]]:
    """What a step says; tenants and their tokens, of prompts (None without any) and of answers."""
    plan, tenants, result, duration_ns = made
    assert result is not None
    decode = plan.kind == Kind.DECODE
    n = plan.n if plan.rounds == 1 else np.ones_like(plan.n)
    if not np.array_equal(plan.slot, result.slot):  # A plan has one item a slot, so slots tell which a row is of.
        tenants, n = (_by_slot(plan.slot, column, result.slot) for column in (tenants, n))
        decode = _by_slot(plan.slot, decode.astype(np.int32), result.slot).astype(np.bool_)
    decodes = int(np.count_nonzero(decode))
    chunk = None if decodes == len(decode) else np.where(decode, 0, n)
    drafted, new = result.drafted.tolist(), result.n_new.tolist()
    guesses = sum(drafted)
    row = _StepRow(
        duration_ns=duration_ns,
        prefill_tokens=0 if chunk is None else int(chunk.sum()),
        decodes=decodes,
        drafted=guesses,
        accepted=sum(more - 1 for more, of in zip(new, drafted, strict=True) if of) if guesses else 0,
        depth=sum(result.depth.tolist()) if len(result.depth) else guesses,
        asked=int(n.sum() if chunk is None else n[decode].sum()) - decodes,
        rounds=result.rounds,
    )
    return row, None if chunk is None else (tenants, chunk), (tenants, result.n_new)


def _columns(rows: Sequence[tuple[int, ...]], fields: int) -> tuple[Times, Ints]:
    """Shape [fields, rows], as times and as counts; nobody may change them."""
    times = np.array(rows, dtype=np.int64).reshape(-1, fields).T
    counts = times.astype(np.int32)
    times.flags.writeable = counts.flags.writeable = False
    return times, counts


_NO_ENDS = _columns([], len(_EndRow._fields))


def _by_slot(slots: Col, values: Col, wanted: Col) -> Col:
    """The values of the wanted slots, 0 where a slot is not there."""
    table = np.zeros(int(max(slots.max(initial=0), wanted.max(initial=0))) + 1, dtype=np.int32)
    table[slots] = values
    picked: Col = table[wanted]
    return picked


def _by_tenant(steps: Sequence[tuple[Col, Col]], least: int) -> Times:
    """Sums of the steps' tokens, from columns of tenants and tokens; shape [tenants], at least so many."""
    if not steps:
        return np.zeros(least, dtype=np.int64)
    tenants, tokens = steps[0] if len(steps) == 1 else map(np.concatenate, zip(*steps, strict=True))
    return np.bincount(tenants, tokens, least).astype(np.int64)
