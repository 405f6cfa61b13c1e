"""Cuts the attention of a step into work for thread blocks. Knows lengths, no tensors of the model and no device.

A request's query tokens times the heads of a group are its packed rows, so that a decode and a chunk of a prompt are
the same thing: rows against a range of keys. Long contexts are split and merged. Where they are split depends on the
request alone, never on its company: that keeps a request's numbers the same in any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int32]

TILE = 16
ROUND = 4 * TILE
"""Keys in which each warp of the decode kernel has its tile, or two."""
TREE = 64
"""Tokens of a drafted tree at most, the one that it hangs on included: so many bits has a mask."""


class Query(NamedTuple):
    """Tokens [first, first + tokens) of the step, the last `tokens` of a sequence of `length`; row `table` of the
    block tables is theirs."""

    table: int
    first: int
    tokens: int
    length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`works` and `merges` are rows of 8 numbers, as the kernels' structs have them."""

    works: Ints
    merges: Ints
    parts: int
    rows: int
    """Packed rows in a work."""
    order: Ints | None = None
    """The step's tokens that works and merges speak of; None: as they are."""
    shared: Plan | None = None
    """Works on keys that sequences share, whose parts the merges ask for too."""


def plan(queries: list[Query], group: int, rows: int, split: int = 0, window: int = 0, step: int = TILE) -> Plan:
    """`split` keys (a multiple of 16) at most for a work; 0 for no splitting. `window` 0 sees everything; with one,
    works begin at a multiple of `step`: with `ROUND` a key is the same warp's, whatever else is in its work.

    In what may be a tree a token's position is not its cell, and may be its first token's: all see what that sees."""
    if split % TILE:
        raise ValueError(f"split is {split}; it must be a multiple of {TILE}")
    works: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    parts = 0
    for query in queries:
        before = query.length - query.tokens
        packed = query.tokens * group
        for row in range(0, packed, rows):
            row_end = min(row + rows, packed)
            key_end = before + (row_end - 1) // group + 1
            token = 0 if query.tokens <= TREE else row // group
            first = max(0, before + token + 1 - window) if window else 0
            keys = ranges(first // step * step, key_end, split)
            for i, (key, end) in enumerate(keys):
                part = parts + i if len(keys) > 1 else -1
                works.append((query.table, query.first, row, row_end, key, end, part, 0))
            if len(keys) > 1:
                merges.append((query.first, row, row_end, parts, len(keys), 0, 0, 0))
                parts += len(keys)
    return Plan(structs(works), structs(merges), parts, rows)


def fitting_split(queries: list[Query], group: int, rows: int, blocks: int, window: int = 0) -> int:
    """The least power of two from 128 on with which there are at most `blocks` works, or no query is split."""
    return fitting(plan(queries, group, rows, window=window).works, blocks)


def fitting(works: Ints, blocks: int) -> int:
    """The same for works that are not split yet."""
    split, first, end = 128, works[:, 4], works[:, 5]
    while (pieces := (end - 1) // split - first // split + 1).max(initial=1) > 1 and pieces.sum() > blocks:
        split *= 2
    return split


def ranges(first: int, end: int, split: int) -> list[tuple[int, int]]:
    """Cut [first, end) at multiples of `split`: the cuts stay where they are as a sequence grows."""
    if not split:
        return [(first, end)]
    cuts = [first, *range(first // split * split + split, end, split), end]
    return list(pairwise(cuts))


def structs(rows: list[tuple[int, ...]]) -> Ints:
    return np.array(rows, dtype=np.int32).reshape(-1, 8)
