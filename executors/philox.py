"""Philox4x32-10: random numbers as a function of a key and a counter, so nothing has to remember a state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Knows nothing of sampling but
the words that tell its draws apart.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint32]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10
_FEW = 8


class Purpose(IntEnum):
    """What a draw is for: draws for different purposes are independent."""

    SAMPLE = 0
    DRAFT = 1
    """A drafter's own choice, where it must not know the target's."""
    ACCEPT = 2
    RESAMPLE = 3


def philox4x32(counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], key: int) -> Words:
    """Four random words for each counter. The counter's words (32 bits each) broadcast against each other to
    shape [n]; `key` has 64 bits, its low half first. Returns [n, 4]."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.atleast_1d(np.asarray(word, dtype=np.uint64)) for word in counter))
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def block(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """The same four words of one counter, in plain numbers: for a few counters an array's overhead is the greater."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF
        c2, c3 = p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(
    ids: npt.NDArray[np.int64], seed: int, choice: int, position: int, purpose: Purpose
) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each id, shape [n]: a function of the arguments and that id alone."""
    if len(ids) <= _FEW:
        few = ids.tolist()
        blocks = {i: block((i, position, choice, purpose), seed) for i in {one >> 2 for one in few}}
        return (np.array([blocks[one >> 2][one & 3] for one in few], dtype=np.float64) + 0.5) / 2.0**32
    lanes = ids & 3
    if len(ids) and ids[-1] == len(ids) - 1 and np.array_equal(ids, np.arange(len(ids))):
        counters = np.arange(-(-len(ids) // 4))  # all ids in order: four neighbours share a counter
        words = philox4x32((counters, position, choice, purpose), seed).reshape(-1)[: len(ids)]
    else:
        words = philox4x32((ids >> 2, position, choice, purpose), seed)[np.arange(len(ids)), lanes]
    return (words.astype(np.float64) + 0.5) / 2.0**32
