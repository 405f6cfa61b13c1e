"""How much work an executed step was, in the terms of a cost model. Knows nothing of what it costs.

Said by the executor's process for every step (`step.executed`) and counted by the simulator in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.core.messages import Col, Kind, StepBind, StepPlan, StepResult

_CHUNK = int(Kind.CHUNK)  # an enum's member takes longer to find than all else


class Work(NamedTuple):
    prefill_tokens: int
    """Known tokens computed by chunks."""
    decodes: int
    """Sequences that decoded."""
    attention: int
    """Pairs of a computed token and a token that it attends to, itself included."""
    kv_tokens: int
    """Tokens of KV that the items read, each once an item and round."""
    copied: int = 0
    """Blocks copied before them: for forks, out to host memory, and in from it."""
    rounds: int = 1
    """Times that the sequences decoded, one after the other: in each the whole model is computed."""
    guesses: int = 0
    """Tokens computed to see whether they were guessed right."""


def step_work(plan: StepPlan, bind: StepBind, result: StepResult) -> Work:
    """Of the plan's items but for those that were not bound, as far as they went: decodes may be given fewer guesses
    than were planned, and end before their last round. What a decode attends to is counted from its capacity, an upper
    bound that is exact to within the steps under way."""
    each, rounds = plan.n.tolist(), plan.rounds
    whole = rounds == 1 or result.n_new.tolist() == each
    if whole and not len(bind.skipped) and _CHUNK not in plan.kind.tolist() and each.count(rounds) == len(each):
        # The common step: a token of each in every round.
        tokens = rounds * sum(plan.start_or_cap.tolist()) - len(each) * rounds * (rounds - 1) // 2
        return Work(0, len(each), tokens, tokens, len(bind.copy_src), rounds)
    chunk = plan.kind == Kind.CHUNK
    first = np.where(chunk, plan.start_or_cap, plan.start_or_cap - plan.n) + 1
    n = np.where(chunk, plan.n, _decoded(plan, result))
    if len(bind.skipped):
        kept = np.ones(len(n), dtype=np.bool_)
        kept[bind.skipped] = False
        n, first, chunk = n[kept], first[kept], chunk[kept]
    last = first + n - 1
    attention = int((n.astype(np.int64) * (first + last)).sum()) // 2
    return Work(
        prefill_tokens=int((n * chunk).sum()),
        decodes=len(n) - int(chunk.sum()),
        attention=attention,
        kv_tokens=int(last.sum(dtype=np.int64)) if plan.rounds == 1 else attention,
        copied=len(bind.copy_src),
        rounds=result.rounds,
        guesses=int(result.drafted.sum()),
    )


def _decoded(plan: StepPlan, result: StepResult) -> Col:
    """Tokens that each item computed if it is a decode, shape [items]: one and its guesses, or one a round."""
    computed = result.n_new if plan.rounds > 1 else 1 + result.drafted if len(result.drafted) else None
    if computed is None:
        return np.ones(len(plan.n), dtype=np.int32)
    by_slot = dict(zip(result.slot.tolist(), computed.tolist(), strict=True))
    return np.array([by_slot.get(slot, 1) for slot in plan.slot.tolist()], dtype=np.int32)
