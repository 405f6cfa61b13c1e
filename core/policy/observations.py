"""Gathers what policies are told of: steps and their times, what tenants got, who finished. See `Observed`.

Nothing is gathered while nobody wants to know (`on`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.core.messages import Col, Kind, StepPlan, StepResult
from octavo.policies.contract import Ints, Observed, Times


class _Made(NamedTuple):
    """A plan under way."""

    plan: StepPlan
    tenants: Ints
    """Of its items."""


class _StepRow(NamedTuple):
    duration_ns: int
    prefill_tokens: int
    decodes: int
    drafted: int
    accepted: int
    depth: int
    asked: int


class _EndRow(NamedTuple):
    tenant: int
    prompt: int
    output: int
    preemptions: int
    ttft_ns: int
    total_ns: int


class Observations:
    def __init__(self) -> None:
        self.on = False
        self._made: dict[int, _Made] = {}
        self._last_result_ns = 0
        self._steps: list[_StepRow] = []
        self._ends: list[_EndRow] = []
        self._prefill: Times = np.zeros(0, dtype=np.int64)
        self._output: Times = np.zeros(0, dtype=np.int64)

    def planned(self, plan: StepPlan, tenants: Ints) -> None:
        """A plan goes out; `tenants` are those of all slots."""
        if self.on:
            self._made[plan.step] = _Made(plan, tenants[plan.slot])

    def completed(self, now_ns: int, result: StepResult) -> None:
        made = self._made.pop(result.step, None)
        began_ns, self._last_result_ns = self._last_result_ns, now_ns
        if made is None:
            return
        plan, slots = made.plan, result.slot
        # A plan has one item a slot, so slots tell which item a row of the result is of.
        tenants = _by_slot(plan.slot, made.tenants, slots)
        n = _by_slot(plan.slot, plan.n, slots)
        decode = _by_slot(plan.slot, (plan.kind == Kind.DECODE).astype(np.int32), slots).astype(np.bool_)
        chunk = np.where(decode, 0, n)
        drafted = result.drafted
        self._steps.append(
            _StepRow(
                duration_ns=now_ns - max(plan.now_ns, began_ns),
                prefill_tokens=int(chunk.sum()),
                decodes=int(decode.sum()),
                drafted=int(drafted.sum()),
                accepted=int((result.n_new - 1)[drafted > 0].sum()) if len(drafted) else 0,
                depth=int((result.depth if len(result.depth) else drafted).sum()),
                asked=int((n - 1)[decode].sum()),
            )
        )
        self._prefill = _add(self._prefill, tenants, chunk)
        self._output = _add(self._output, tenants, result.n_new)

    def finished(self, *, tenant: int, prompt: int, output: int, preemptions: int, ttft_ns: int, total_ns: int) -> None:
        """A sequence ended with an answer."""
        if self.on:
            self._ends.append(_EndRow(tenant, prompt, output, preemptions, ttft_ns, total_ns))

    def lost(self) -> None:
        """Nothing that was planned counts any more."""
        self._made.clear()

    def take(self, now_ns: int) -> Observed | None:
        """All since the last call, or None if there is nothing to tell."""
        if not self._steps and not self._ends:
            return None
        steps = np.asarray(self._steps, dtype=np.int64).reshape(-1, 7).T
        ends = np.asarray(self._ends, dtype=np.int64).reshape(-1, 6).T
        tenants = max(len(self._prefill), len(self._output))
        columns = (
            steps[0], *steps[1:5].astype(np.int32), _padded(self._prefill, tenants), _padded(self._output, tenants),
            *ends[:4].astype(np.int32), *ends[4:], *steps[5:].astype(np.int32),
        )  # fmt: skip
        for column in columns:
            column.flags.writeable = False
        self._steps, self._ends = [], []
        self._prefill, self._output = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return Observed(now_ns, *columns)


def _by_slot(slots: Col, values: Col, wanted: Col) -> Col:
    """The values of the wanted slots, 0 where a slot is not there."""
    table = np.zeros(int(max(slots.max(initial=0), wanted.max(initial=0))) + 1, dtype=np.int32)
    table[slots] = values
    picked: Col = table[wanted]
    return picked


def _add(sums: Times, tenants: Col, tokens: Col) -> Times:
    more = np.bincount(tenants, tokens, len(sums)).astype(np.int64)
    more[: len(sums)] += sums
    return more


def _padded(sums: Times, length: int) -> Times:
    return sums if len(sums) == length else np.pad(sums, (0, length - len(sums)))  # a pad takes longer than the rest
