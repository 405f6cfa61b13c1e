"""What a step computes, laid out as index tensors: once per step, used by every layer.

Turns spans (tokens [start, end) of a sequence over its block table) into pool rows and attention tiles. Each span
is cut into query tiles of an allowed size; spans of one tile, as all decodes are, are batched with others of like
length. A tile that is not full repeats its last query.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.executors.residents import Span as Span
from octavo.kernels.attention import KEYS, Gather, QueryTile

_MOST_SCORES = 1 << 20
"""Queries times keys in one batch of tiles: bounds the memory of its scores (times heads, 4 bytes each)."""

Indices: TypeAlias = npt.NDArray[np.int64]


class PoolShape(NamedTuple):
    """A layer's pool, see `kernels.attention`: blocks · block_size slots and the row of zeros."""

    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    @property
    def rows(self) -> int:
        return 2 * self.kv_heads * (self.slots + 1)

    def expand(self, slots: Indices, kv: int) -> Indices:
        """Pool rows [Hkv, *slots.shape] of keys (0) or values (1)."""
        heads = (kv * self.kv_heads + np.arange(self.kv_heads)) * (self.slots + 1)
        return heads.reshape(-1, *(1,) * slots.ndim) + slots


class Layout(NamedTuple):
    """A step's tokens, flat. Tensors have `rows` entries, the first `tokens` of which are real ones and the rest
    repeat the last; `writes` are the pool rows of the real ones, [2, Hkv, tokens] flattened."""

    tokens: int
    ids: Tensor
    positions: Tensor
    writes: Tensor
    gathers: list[Gather]
    order: Tensor


def build(spans: list[Span], rows: int, tile_sizes: tuple[int, ...], shape: PoolShape) -> Layout:
    """Lay out `spans` over `rows` rows. Query tiles take one of `tile_sizes` (ascending)."""
    first = np.cumsum([0, *(len(span.ids) for span in spans)])
    tokens = int(first[-1])
    ids = np.concatenate([np.asarray(span.ids, dtype=np.int64) for span in spans])
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    slots = np.concatenate([_slots(span, shape.block_size)[span.start :] for span in spans])
    gathers: list[Gather] = []
    sources = np.empty(rows, dtype=np.int64)
    at = 0
    for group in _groups(spans, tile_sizes):
        gather, which = _gather([spans[i] for i in group], first[group], tile_sizes, shape)
        gathers.append(gather)
        for source, target in which:
            sources[target] = source + at
        at += sum(len(tile.queries) for tile in gather.tiles)
    sources[tokens:] = sources[tokens - 1]
    return Layout(
        tokens,
        _padded(ids, rows),
        _padded(positions, rows),
        torch.from_numpy(np.stack([shape.expand(slots, 0), shape.expand(slots, 1)]).reshape(-1)),
        gathers,
        torch.from_numpy(sources),
    )


def _groups(spans: list[Span], tile_sizes: tuple[int, ...]) -> Iterator[list[int]]:
    """Spans that share a gather: a long span is alone, others go with those of equal tile size and, up to a factor
    of two, equal length."""

    def like(i: int) -> tuple[int, int, int]:
        span = spans[i]
        if len(span.ids) > tile_sizes[-1]:
            return tile_sizes[-1], 0, i
        return _size(len(span.ids), tile_sizes), (_key_tiles(span.end) - 1).bit_length(), -1

    for (size, _, _), members in groupby(sorted(range(len(spans)), key=like), key=like):
        group: list[int] = []
        keys = 0
        for i in members:
            keys = max(keys, _key_tiles(spans[i].end) * KEYS)
            if group and (len(group) + 1) * size * keys > _MOST_SCORES:
                yield group
                group, keys = [], _key_tiles(spans[i].end) * KEYS
            group.append(i)
        yield group


def _gather(
    spans: list[Span], first: Indices, tile_sizes: tuple[int, ...], shape: PoolShape
) -> tuple[Gather, list[tuple[Indices, Indices]]]:
    """The gather of a group, and which results belong to which of the step's rows: (results, rows) pairs."""
    key_tiles = max(_key_tiles(span.end) for span in spans)
    slots = np.full((len(spans), key_tiles * KEYS), shape.slots, dtype=np.int64)
    for b, span in enumerate(spans):
        slots[b, : span.end] = _slots(span, shape.block_size)
    keys = shape.expand(slots, 0)
    values = shape.expand(slots.reshape(len(spans), key_tiles, KEYS), 1).transpose(2, 0, 1, 3)
    tiles: list[QueryTile] = []
    pairs: list[tuple[Indices, Indices]] = []
    longest = max(len(span.ids) for span in spans)
    results = 0
    for offset in range(0, longest, tile_sizes[-1]):
        size = _size(min(longest - offset, tile_sizes[-1]), tile_sizes)
        queries = np.empty((len(spans), size), dtype=np.int64)
        seen = np.empty((len(spans), size), dtype=np.int64)
        for b, span in enumerate(spans):
            n = min(size, len(span.ids) - offset)
            within = offset + np.minimum(np.arange(size), n - 1)
            queries[b], seen[b] = first[b] + within, span.start + within
            pairs.append((results + b * size + np.arange(n), queries[b, :n]))
        n_tiles = _key_tiles(int(seen.max()) + 1)
        visible = np.arange(n_tiles * KEYS) <= seen[:, :, None]
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))[:, :, None, :]
        tiles.append(QueryTile(torch.from_numpy(queries.reshape(-1)), torch.from_numpy(bias), n_tiles))
        results += queries.size
    rows = torch.from_numpy(np.concatenate([keys.reshape(-1), values.reshape(-1)]))
    return Gather(rows, len(spans), key_tiles, tiles), pairs


def _size(n: int, tile_sizes: tuple[int, ...]) -> int:
    """The least allowed tile for n queries."""
    return tile_sizes[bisect_left(tile_sizes, n)]


def _key_tiles(keys: int) -> int:
    return -(-keys // KEYS)


def _slots(span: Span, block_size: int) -> Indices:
    """Pool slots of positions [0, end)."""
    positions = np.arange(span.end)
    return np.asarray(span.table, dtype=np.int64)[positions // block_size] * block_size + positions % block_size


def _padded(values: Indices, rows: int) -> Tensor:
    return torch.from_numpy(np.pad(values, (0, rows - len(values)), mode="edge"))
