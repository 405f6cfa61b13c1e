"""An executor of lengths: it answers a bound step as any executor does, but keeps no tokens and no KV.

For simulations of many requests; the ghost, which checks every read, takes ten times as long and answers with the same
lengths. Sequences are columns by slot, as the scheduler has them.
"""

from __future__ import annotations

import numpy as np

from octavo.core.messages import Col, Kind, StepBind, StepPlan, StepResult

TOKEN = 97
"""Every output: equal prompts have equal answers, and nothing ends by itself."""


class LeanExecutor:
    """`slots` is the scheduler's; of the drafts of a decode, the first ones are right, each with chance
    `acceptance` (a fixed sequence, so that runs repeat)."""

    def __init__(self, slots: int, acceptance: float = 0.6) -> None:
        self._open_id = np.full(slots, -1, dtype=np.int32)
        self._known = np.zeros(slots, dtype=np.int32)
        self._kv_len = np.zeros(slots, dtype=np.int32)
        self._acceptance = acceptance

    def forget(self) -> None:
        self._open_id[:] = -1

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        if len(plan.release_slot) or len(bind.opened_slot):
            self._open(plan, bind)
        slot, n, at, chunk = plan.slot, plan.n, plan.start_or_cap, plan.kind == Kind.CHUNK
        known = self._known[slot]
        # A decode whose drafts in flight took it past its capacity already has nothing to do.
        runs = chunk | (known <= at)
        if len(bind.skipped):
            runs[bind.skipped] = False
        if not runs.all():
            slot, n, at, chunk, known = slot[runs], n[runs], at[runs], chunk[runs], known[runs]
        ends = np.where(chunk, at + n, known)
        has, needs = self._kv_len[slot], np.where(chunk, at, known - 1)
        if not (has == needs).all() or not (ends <= known).all():
            self._refuse(plan.step, slot, has, needs)
        new = (ends == known).astype(np.int32)
        if plan.rounds > 1:
            new += np.minimum(plan.rounds - 1, at - known)
        elif int(n.sum()) > len(n) and not chunk.all():
            new += np.where(chunk, 0, self._accepted(known, np.minimum(n - 1, at - known)))
        self._known[slot] = known + new
        self._kv_len[slot] = kv_len = np.where(new > 0, known + new - 1, ends)
        tokens = np.full(int(new.sum()), TOKEN, dtype=np.int32)
        return StepResult(plan.step, slot, self._open_id[slot], new, tokens, kv_len, 0, 0, rounds=plan.rounds)

    def _open(self, plan: StepPlan, bind: StepBind) -> None:
        self._open_id[plan.release_slot[self._open_id[plan.release_slot] == plan.release_open_id]] = -1
        lengths = {o.open_id: len(o.ids) for o in plan.opens}
        lengths |= {f.open_id: f.n + len(f.ids) for f in plan.forks}
        opened = bind.opened_slot
        self._open_id[opened] = bind.opened_open_id
        self._known[opened] = [lengths[open_id] for open_id in bind.opened_open_id.tolist()]
        self._kv_len[opened] = bind.opened_len

    @staticmethod
    def _refuse(step: int, slot: Col, has: Col, needs: Col) -> None:
        """What every executor insists on: a chunk goes on where the KV ends, a decode needs all but its last token."""
        i = int(np.flatnonzero(has != needs)[0]) if (has != needs).any() else 0
        raise RuntimeError(f"step {step}: the KV of slot {slot[i]} has {has[i]} tokens, its item needs {needs[i]}")

    def _accepted(self, known: Col, drafts: Col) -> Col:
        """How many drafts are right: geometric, by a hash of the position."""
        uniform = ((known.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)) >> np.uint64(11)) / float(1 << 53)
        right = np.floor(np.log(np.maximum(uniform, 1e-12)) / np.log(self._acceptance))
        accepted: Col = np.minimum(right, drafts).astype(np.int32)
        return accepted
