"""The kernel's own rules: what is done when a policy's answer is not valid, or when it is tripped.

The plain ones: in order of arrival, prefills one after the other, the youngest gives way, least recently used goes,
no drafts. And the limits that hold whatever a policy says.
"""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Floats, Ints, Leaves, Running, Selection, Step, Waiting

MAX_SENT_BACK = 8
"""Who lost its slot so often loses it to no batching policy any more, and for want of blocks only if all have."""
MAX_HOLD_NS = 10_000_000_000
"""Longest that a batching policy may let the engine rest while somebody waits."""
AGEING_NS = 30_000_000_000
"""Once in this time, whoever arrived first goes first, if it has waited as long: nobody waits for ever."""
MAX_LEFT_OUT = 64
"""Steps in a row that a resident sequence may be given nothing."""


def select_in_order(waiting: Waiting) -> Selection:
    return Selection(np.arange(len(waiting), dtype=np.int32))


def split_in_order(step: Step, remaining: Ints, decode_tokens: int) -> Ints:
    """One prefill after the other."""
    room = max(0, step.chunk_budget - decode_tokens)
    before: Ints = np.cumsum(remaining, dtype=np.int32) - remaining
    return np.minimum(np.maximum(room - before, 0), remaining)


def youngest_first(candidates: Running) -> Ints:
    return np.argsort(-candidates.arrival_ns, kind="stable").astype(np.int32)


def spare_the_tried(order: Ints, candidates: Running) -> Ints:
    """The order of victims, but those that were sent back too often last: nobody is sent back for ever."""
    tried = candidates.preemptions[order] >= MAX_SENT_BACK
    return np.concatenate([order[~tried], order[tried]]) if tried.any() else order


def least_recent(leaves: Leaves) -> Floats:
    return leaves.last_used.astype(np.float64)


def no_drafts(running: Running) -> Ints:
    return np.zeros(len(running), dtype=np.int32)
