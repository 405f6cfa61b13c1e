"""What sampling kernels are told of a row: `Draw` of draw.cuh as a NumPy record."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Draws: TypeAlias = npt.NDArray[np.void]

DRAW = np.dtype(
    [
        (name, np.float64)
        for name in ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency")
    ]
    + [("seed", np.uint64)]
    + [(name, np.int32) for name in ("choice", "position", "top_k", "counts", "allowed", "bias", "bias_end", "unused")]
)

IN_PROMPT = 1 << 30
"""Set in a token's count when the prompt has it."""


def draws(rows: int) -> Draws:
    """`rows` greedy draws that nothing is applied to."""
    made = np.zeros(rows, dtype=DRAW)
    made["top_p"] = made["typical_p"] = made["repetition"] = 1.0
    made["counts"] = made["allowed"] = -1
    return made
