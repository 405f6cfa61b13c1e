"""The spans of a step as flat arrays: tokens, positions, where KV goes, block tables, and the work of attention.

Pure NumPy: what comes of it is brought to the device as it is.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.executors.residents import Span
from octavo.kernels.cuda.cascade import cascade, fitting_cascade, groups
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS
from octavo.kernels.cuda.plan import TILE, Plan, Query, fitting_split, plan

Ints: TypeAlias = npt.NDArray[np.int32]

TREE = 64
"""Tokens of a tree, the one that it hangs on included."""
SPLIT = 512
"""Keys in a part of a long context, where how a sequence is cut may not depend on its company."""


SHARED = 256
"""Keys that sequences must share at least for their attention to them to be one work, where speed alone counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    ids: npt.NDArray[np.int64]
    positions: Ints
    slots: npt.NDArray[np.int64]
    """Place in the pool of each token: block · block_size + offset."""
    tables: Ints
    lengths: Ints
    """Of each span's sequence, its own tokens included."""
    firsts: Ints
    """First token of each span, and past the last token."""
    block_size: int
    tree_mask: npt.NDArray[np.int64] | None = None
    tree_start: Ints | None = None
    """As a `Step` has them, where a span is a tree."""

    def queries(self) -> list[Query]:
        firsts, lengths = self.firsts.tolist(), self.lengths.tolist()
        return [
            Query(i, first, firsts[i + 1] - first, length)
            for i, (first, length) in enumerate(zip(firsts[:-1], lengths, strict=True))
        ]


def build(spans: list[Span], block_size: int) -> Batch:
    """`spans` is not empty, nor is one of them. An id below 0 is one that the device knows."""
    counts = np.array([len(span.ids) for span in spans], dtype=np.int32)
    starts = np.array([span.start for span in spans], dtype=np.int32)
    lengths = starts + counts
    firsts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(counts, out=firsts[1:])
    tables = _tables(spans)
    ids = np.array([token for span in spans for token in span.ids], dtype=np.int64)
    if len(ids) == len(spans):
        positions, row = starts, np.arange(len(spans))
    else:
        positions = np.arange(firsts[-1], dtype=np.int32) - np.repeat(firsts[:-1] - starts, counts)
        row = np.repeat(np.arange(len(spans)), counts)
    cells = positions
    if any(span.paths is not None for span in spans):
        positions = np.array([position for span in spans for position in span.positions], dtype=np.int32)
    blocks = tables[row, cells // block_size].astype(np.int64)
    slots = blocks * block_size + cells % block_size
    return Batch(ids, positions, slots, tables, lengths, firsts, block_size, *_trees(spans))


def _trees(spans: list[Span]) -> tuple[npt.NDArray[np.int64] | None, Ints | None]:
    """Cells are given out in the order of a span's tokens, so what a node sees of its tree is bits of a mask."""
    if all(span.paths is None for span in spans):
        return None, None
    masks: list[int] = []
    starts: list[int] = []
    for span in spans:
        if span.paths is None:
            masks += [0] * len(span.ids)
            starts += [-1] * len(span.ids)
        else:
            masks += [sum(1 << (cell - span.start) for cell in path) for path in span.paths]
            starts += [span.start] * len(span.ids)
    return np.array(masks, dtype=np.uint64).view(np.int64), np.array(starts, dtype=np.int32)


def _tables(spans: list[Span]) -> Ints:
    """Their block tables as rows, as wide as the longest."""
    sizes = np.array([len(span.table) for span in spans])
    tables = np.zeros((len(spans), int(sizes.max())), dtype=np.int32)
    flat = np.frombuffer(b"".join([array("i", span.table) for span in spans]), dtype=np.int32)
    tables[np.arange(tables.shape[1]) < sizes[:, None]] = flat
    return tables


def attention_plans(
    batch: Batch,
    group: int,
    kv_heads: int,
    *,
    fill: int,
    window: int = 0,
    rows: tuple[int, ...] = (DECODE_ROWS, PREFILL_ROWS),
    together: bool = True,
) -> list[Plan]:
    """What attention has to do, for each of its kernels, empty plans left out. `group` is how many query heads
    share a KV head; with a `window`, keys that no query sees are left out. `rows` are those of the kernels' works.

    With `fill`, contexts are cut such that about so many blocks run at once, and each query goes to the kernel with the
    fewest rows that hold all of its own. With 0, a token's numbers may depend on nothing but its sequence: one kernel
    for all, fixed cuts. With `together`, and no window, sequences that begin with the same blocks attend to them as
    one."""
    queries, together = batch.queries(), together and not window
    if not fill:
        if together and (common := groups(queries, batch.tables, batch.block_size, step=SPLIT, least=SPLIT)):
            return [cascade(queries, common, group, DECODE_ROWS, DECODE_ROWS, SPLIT)]
        return [plan(queries, group, DECODE_ROWS, SPLIT, window)]
    shares: dict[int, list[Query]] = {n: [] for n in rows}
    for query in queries:
        shares[next((n for n in rows if query.tokens * group <= n), rows[-1])].append(query)
    blocks = max(1, fill // kv_heads)
    few, plans = shares[rows[0]], []
    if together and (common := groups(few, batch.tables, batch.block_size, step=TILE, least=SHARED)):
        plans.append(fitting_cascade(few, common, group, rows[0], rows[-1], blocks))
        few.clear()
    plans += [
        plan(mine, group, n, fitting_split(mine, group, n, blocks, window), window)
        for n, mine in shares.items()
        if mine
    ]
    return [made for made in plans if len(made.works)]
