"""Who loses least gives way first."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Ints, Running, Step


class Cheapest:
    """Work lost is what is computed, but for what came from the prefix tree and is probably there again. Among
    equals the latest gives way."""

    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        lost = candidates.planned - np.minimum(candidates.cached, candidates.planned)
        return np.lexsort((-candidates.arrival_ns, lost)).astype(np.int32)
