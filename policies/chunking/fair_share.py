"""Every prefill gets an equal part of the budget; what a short one leaves is shared by the others."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Ints, Step


class FairShare:
    """Max-min fair: a short prompt is done soon however long those beside it are (processor sharing)."""

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        tokens = np.zeros(len(remaining), dtype=np.int32)
        room = max(0, step.chunk_budget - decode_tokens)
        shortest_first = np.argsort(remaining, kind="stable")
        # The level to which all are filled: the shortest ones are done below it, the others end at it.
        sizes = remaining[shortest_first].astype(np.int64)
        others = np.arange(len(sizes), 0, -1)
        filled = np.cumsum(sizes) - sizes + sizes * others <= room
        done = int(filled.sum())
        tokens[shortest_first[:done]] = sizes[:done]
        if done < len(sizes):
            level, extra = divmod(room - int(sizes[:done].sum()), len(sizes) - done)
            rest = np.sort(shortest_first[done:])
            tokens[rest] = level
            tokens[rest[:extra]] += 1
        return tokens
