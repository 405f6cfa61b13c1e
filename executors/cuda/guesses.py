"""A step's guesses as the kernels that verify them read them: trees of nodes, one after another. Pure NumPy.

A sequence's node 0 is its last token, node 1 + i its guess i; parents are counted from its node 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.executors.drafting.contract import Draft


def nodes_of(drafts: Sequence[Draft]) -> dict[str, npt.NDArray[Any]]:
    """`firsts` of each draft's nodes, and past the last; by node `guesses` and `parents`. All int32."""
    firsts: list[int] = [0]
    guesses: list[int] = []
    parents: list[int] = []
    for draft in drafts:
        guesses += (-1, *draft.tokens)
        nodes = draft.parents
        parents += range(-1, len(draft.tokens)) if nodes is None else (-1, *(node + 1 for node in nodes))
        firsts.append(len(guesses))
    columns = {"firsts": firsts, "guesses": guesses, "parents": parents}
    return {name: np.array(column, dtype=np.int32) for name, column in columns.items()}


def drawn_from(drafts: Sequence[Draft]) -> npt.NDArray[np.int32]:
    """By node, the row of its distribution among those of all drafts that have them; -1 where there is none."""
    rows: list[int] = []
    known = 0
    for draft in drafts:
        n = len(draft.tokens)
        rows += (-1, *(range(known, known + n) if draft.chances is not None else [-1] * n))
        known += n if draft.chances is not None else 0
    return np.array(rows, dtype=np.int32)


def portions(drafts: Sequence[Draft], most: int) -> Iterator[list[Draft]]:
    """In their order, with at most so many distributions each, or one draft."""
    portion: list[Draft] = []
    rows = 0
    for draft in drafts:
        mine = 0 if draft.chances is None else len(draft.tokens)
        if portion and rows + mine > most:
            yield portion
            portion, rows = [], 0
        portion.append(draft)
        rows += mine
    if portion:
        yield portion
