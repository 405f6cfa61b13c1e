"""How much work an executed step was, in the terms of a cost model. Knows nothing of what it costs.

Said by the executor's process for every step (`step.executed`) and counted by the simulator in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.core.messages import Kind, StepBind, StepPlan


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


def step_work(plan: StepPlan, bind: StepBind) -> Work:
    """Of the plan's items but for those that were not bound. What a decode attends to is its capacity, an upper
    bound that is exact to within the steps under way."""
    if not len(bind.skipped) and Kind.CHUNK not in plan.kind.tolist() and int(plan.n.max(initial=1)) == 1:
        tokens = sum(plan.start_or_cap.tolist())  # the common step: one token each
        return Work(0, len(plan.n), tokens, tokens, len(bind.copy_src))
    n, at, chunk = plan.n, plan.start_or_cap, plan.kind == Kind.CHUNK
    if len(bind.skipped):
        kept = np.ones(len(n), dtype=np.bool_)
        kept[bind.skipped] = False
        n, at, chunk = n[kept], at[kept], chunk[kept]
    ends = at + n * chunk
    first = np.where(chunk, at, ends - n) + 1
    attention = int((n.astype(np.int64) * (first + ends)).sum()) // 2
    return Work(
        prefill_tokens=int((n * chunk).sum()),
        decodes=len(n) - int(chunk.sum()),
        attention=attention,
        kv_tokens=int(ends.sum(dtype=np.int64)) if plan.rounds == 1 else attention,
        copied=len(bind.copy_src),
        rounds=plan.rounds,
    )
