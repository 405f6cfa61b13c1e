"""The youngest request gives way first, so that the oldest always gets on."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Ints, Running, Step


class Lifo:
    """Last in, first out, by arrival."""

    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        return np.argsort(-candidates.arrival_ns, kind="stable").astype(np.int32)
