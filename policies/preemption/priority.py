"""The least urgent gives way first; it belongs to the batching policy of the same name."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Ints, Running, Step


class Priority:
    """By the client's priority, among equals the latest first."""

    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        return np.lexsort((-candidates.arrival_ns, candidates.priority)).astype(np.int32)
