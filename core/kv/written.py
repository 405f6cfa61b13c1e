"""Ids as the prefix tree knows them where an executor computes a prompt's tokens otherwise than those it generates.

A generated token stands there as ~id, so the KV of a text is found by who reads or writes it as it was computed, and by
nobody else. It must not know sequences, blocks or messages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


def written(ids: Ids, prompt_len: int) -> Ids:
    """The same ids, those from position `prompt_len` on as generated ones; below 0: all of them."""
    if prompt_len >= len(ids):
        return ids
    marked, first = ids.copy(), max(prompt_len, 0)
    np.invert(marked[first:], out=marked[first:])
    return marked


def read(ids: bytes) -> bytes:
    """What is written there, whoever wrote it; int32 both."""
    marked = np.frombuffer(ids, dtype=np.int32)
    return (marked ^ (marked >> 31)).tobytes()
