"""No prompt is cut that can be computed in one step: the way before chunked prefill (Orca, early vLLM)."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Ints, Step


class Whole:
    """In order, each whole or not at all; who does not fit holds up those behind it.

    A prompt longer than the budget is cut at the budget, since it could never be computed otherwise: set
    `scheduler.chunk_budget` to the context and nothing is ever cut."""

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        room = max(0, step.chunk_budget - decode_tokens)
        fits = np.cumsum(remaining, dtype=np.int64) <= room
        tokens: Ints = np.where(fits, remaining, 0).astype(np.int32)
        if len(remaining) and not fits[0] and remaining[0] > step.chunk_budget:
            tokens[0] = room
        return tokens
