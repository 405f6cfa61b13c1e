"""What became of drafts: how many guesses were verified, and how many of them were right, by place in their draft.

A guess is *judged* if all before it were right; several for one place of a tree are judged as one. The kernel's own
rules never look at this: it is for policies, metrics and traces.
"""

from __future__ import annotations

import numpy as np

from octavo.core.messages import Col
from octavo.policies.contract import Mask

PLACES = 8
"""Places in a draft that are counted one by one; later ones are only in the sums."""
RECENT = 64
"""Once so many of a slot's guesses were judged, older ones begin to count less."""


class Guesses:
    """Counts of the whole replica, and recent ones by slot (shape [slots])."""

    def __init__(self, slots: int) -> None:
        self.drafted = 0
        self.accepted = 0
        self.judged_at = np.zeros(PLACES, dtype=np.int64)
        self.right_at = np.zeros(PLACES, dtype=np.int64)
        self.judged: Col = np.zeros(slots, dtype=np.int32)
        self.right: Col = np.zeros(slots, dtype=np.int32)

    def forget(self, slot: int) -> None:
        """Another sequence takes it."""
        self.judged[slot] = self.right[slot] = 0

    def take(self, slots: Col, current: Mask, drafted: Col, depth: Col, right: Col) -> None:
        """Of a step's rows that drafted: the slots that they were of and whether they still are, guesses verified,
        places that those were for, and guesses that were right."""
        judged = np.minimum(right + 1, depth)
        self.drafted += int(drafted.sum())
        self.accepted += int(right.sum())
        for counts, reached in ((self.judged_at, judged), (self.right_at, right)):
            ends = np.bincount(np.minimum(reached, PLACES), minlength=PLACES + 1)
            counts += ends[::-1].cumsum()[::-1][1:]  # a row that reached place i passed all before it
        slots = slots[current]
        self.judged[slots] += judged[current]
        self.right[slots] += right[current]
        old = slots[self.judged[slots] > RECENT]
        self.judged[old] //= 2
        self.right[old] //= 2

    @property
    def stats(self) -> dict[str, int]:
        """For status and metrics."""
        places = {f"judged_{i + 1}": int(n) for i, n in enumerate(self.judged_at)}
        places |= {f"accepted_{i + 1}": int(n) for i, n in enumerate(self.right_at)}
        return {"drafted": self.drafted, "accepted": self.accepted, **places}
