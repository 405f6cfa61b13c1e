"""Decodes take what they need of the budget; prefills share the rest in order."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Ints, Step


class DecodeFirst:
    """A fixed budget per step, decodes before chunks (Sarathi-Serve, Agrawal et al., OSDI 2024)."""

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        room = max(0, step.chunk_budget - decode_tokens)
        before: Ints = np.cumsum(remaining, dtype=np.int32) - remaining
        return np.minimum(np.maximum(room - before, 0), remaining)
