"""No drafts."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Ints, Running, Step


class Off:
    """Plain decoding: one token a step."""

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        return np.zeros(len(running), dtype=np.int32)
