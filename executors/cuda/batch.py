"""The runs of a step (or spans) as flat arrays: tokens, positions, places of KV, tables, and the work of attention.

Pure NumPy: what comes of it is brought to the device as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.messages import Adapter
from octavo.executors.adapters import numbered
from octavo.executors.drafting.contract import Draft
from octavo.executors.residents import Runs, Span, span_of
from octavo.kernels.cuda.cascade import cascade, fitting_cascade, groups
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS
from octavo.kernels.cuda.plan import ROUND, TILE, Plan, Query, fitting_split, plan

Ints: TypeAlias = npt.NDArray[np.int32]

_TOKENS, _LAST = attrgetter("tokens"), itemgetter(-1)
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
    adapted: tuple[tuple[Adapter, npt.NDArray[np.int64]], ...] = ()
    """Adapters, and the tokens that each is for."""

    def queries(self) -> list[Query]:
        firsts, lengths = self.firsts.tolist(), self.lengths.tolist()
        return [
            Query(i, first, firsts[i + 1] - first, length)
            for i, (first, length) in enumerate(zip(firsts[:-1], lengths, strict=True))
        ]

    def of(self, rows: list[int]) -> tuple[npt.NDArray[np.int64], Batch]:
        """Of these spans alone, without adapters, and which tokens theirs are."""
        tokens = np.concatenate([np.arange(*self.firsts[row : row + 2], dtype=np.int64) for row in rows])
        firsts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(np.diff(self.firsts)[rows], out=firsts[1:])
        mask, start = self.tree_mask, self.tree_start
        return tokens, Batch(
            self.ids[tokens], self.positions[tokens], self.slots[tokens], self.tables[rows], self.lengths[rows], firsts,
            self.block_size, None if mask is None else mask[tokens], None if start is None else start[tokens],
        )  # fmt: skip


def of_runs(runs: Runs, drafts: list[Draft] | None, block_size: int) -> Batch:
    """Of the runs' tokens and the guesses after them, if there are any. An id below 0 is one that the device knows."""
    if drafts is not None:
        spans = [span_of(run, draft.tokens, draft.parents) for run, draft in zip(runs, drafts, strict=True)]
        made = build(spans, block_size)
    else:
        tables = runs.tables[runs.slot, : -(-int(runs.end.max()) // block_size)]
        if runs.single:
            last = map(_LAST, map(_TOKENS, runs.residents))
            made = _decodes(np.fromiter(last, np.int64, len(runs)), runs.start, tables, block_size)
        else:
            ids = [token for run in runs for token in run.resident.tokens[run.start : run.end]]
            made = _batch(ids, runs.start, runs.end - runs.start, tables, block_size)
    if not runs.adapted:
        return made
    adapters = [resident.adapter for resident in runs.residents]
    return replace(made, adapted=_adapted(adapters, made.firsts))


def _adapted(adapters: list[Adapter | None], firsts: Ints) -> tuple[tuple[Adapter, npt.NDArray[np.int64]], ...]:
    each, having = numbered(adapters)
    by_token = np.repeat(np.array(having), np.diff(firsts))
    return tuple((adapter, np.flatnonzero(by_token == number)) for number, adapter in enumerate(each))


def build(spans: list[Span], block_size: int) -> Batch:
    """`spans` is not empty, nor is one of them."""
    ids, counts = [token for span in spans for token in span.ids], [len(span.ids) for span in spans]
    starts, rows = np.array([span.start for span in spans], dtype=np.int32), _rows([span.table for span in spans])
    made = _batch(ids, starts, np.array(counts, dtype=np.int32), rows, block_size)
    if all(span.paths is None for span in spans):
        return made
    positions = np.array([position for span in spans for position in span.positions], dtype=np.int32)
    mask, start = _trees(spans)
    return replace(made, positions=positions, tree_mask=mask, tree_start=start)


def _decodes(ids: npt.NDArray[np.int64], cells: Ints, tables: Ints, block_size: int) -> Batch:
    """A token of each, at these cells."""
    each = np.arange(len(ids) + 1, dtype=np.int32)
    slots = tables[each[:-1], cells // block_size].astype(np.int64) * block_size + cells % block_size
    return Batch(ids, cells, slots, tables, cells + 1, each, block_size)


def _batch(ids: list[int], first_cells: Ints, n: Ints, rows: Ints, block_size: int) -> Batch:
    firsts = np.zeros(len(n) + 1, dtype=np.int32)
    np.cumsum(n, out=firsts[1:])
    cells = np.arange(firsts[-1], dtype=np.int32) - np.repeat(firsts[:-1] - first_cells, n)
    row = np.repeat(np.arange(len(n)), n)
    slots = rows[row, cells // block_size].astype(np.int64) * block_size + cells % block_size
    return Batch(np.array(ids, dtype=np.int64), cells, slots, rows, first_cells + n, firsts, block_size)


def _trees(spans: list[Span]) -> tuple[npt.NDArray[np.int64], Ints]:
    """Cells are given out in the order of a span's tokens, so what a node sees of its tree is bits of a mask."""
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


def _rows(tables: list[Sequence[int]]) -> Ints:
    """Block tables as rows, as wide as the longest, zeros behind."""
    arrays: list[array[int] | memoryview] = [
        table if isinstance(table, array) else array("i", table) for table in tables
    ]
    sizes = list(map(len, arrays))
    width = max(sizes)
    if min(sizes) < width:
        zeros = memoryview(bytes(4 * width))
        pads = [zeros[4 * size :] for size in sizes]
        arrays = list(chain.from_iterable(zip(arrays, pads, strict=True)))
    return np.frombuffer(bytearray().join(arrays), dtype=np.int32).reshape(len(tables), width)


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
        shared = shared_plan(batch, queries, group, kv_heads, fill, rows) if together else None
        return [shared or plan(queries, group, DECODE_ROWS, SPLIT, window, ROUND)]
    shares: dict[int, list[Query]] = {n: [] for n in rows}
    for query in queries:
        shares[next((n for n in rows if query.tokens * group <= n), rows[-1])].append(query)
    blocks = max(1, fill // kv_heads)
    few, plans = shares[rows[0]], []
    if together and (common := shared_plan(batch, few, group, kv_heads, fill, rows)):
        plans.append(common)
        few.clear()
    plans += [
        plan(mine, group, n, fitting_split(mine, group, n, blocks, window), window)
        for n, mine in shares.items()
        if mine
    ]
    return [made for made in plans if len(made.works)]


def alike(blocks: Ints) -> bool:
    """Whether two of them are the same: first blocks of sequences, without which none share anything."""
    return len(set(blocks.tolist())) < len(blocks)


def shared_plan(
    batch: Batch, queries: list[Query], group: int, kv_heads: int, fill: int, rows: tuple[int, ...]
) -> Plan | None:
    """In which those of the queries that begin with the same blocks attend to them as one; None if none do. Otherwise
    as `attention_plans`; each query has no more rows than the first kernel's works."""
    if not alike(batch.tables[:, 0]):
        return None
    step, least = (TILE, SHARED) if fill else (SPLIT, SPLIT)
    if not (common := groups(queries, batch.tables, batch.block_size, step=step, least=least)):
        return None
    if fill:
        return fitting_cascade(queries, common, group, rows[0], rows[-1], max(1, fill // kv_heads))
    return cascade(queries, common, group, DECODE_ROWS, DECODE_ROWS, SPLIT)
