"""The cached block that was used longest ago goes first."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Floats, Leaves


class Lru:
    """Least recently used."""

    def rank(self, need: int, leaves: Leaves) -> Floats:
        return leaves.last_used.astype(np.float64)
