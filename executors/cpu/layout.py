"""What a step computes, laid out as index tensors: once per step, used by every layer.

Turns spans (tokens of a sequence over its block table) into pool rows and attention tiles. A span is one *piece*, a
tree of tokens as many as it has leaves: tokens at consecutive positions, and where the keys that the last of them sees
are, by position. So keys stand in the order of positions whatever cells they are in, and a token of a tree gets the
bits that it would get without the other branches. Each piece is cut into query tiles of an allowed size; pieces of one
tile, as all decodes are, are batched with others of like length. A tile that is not full repeats its last query.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.executors.cpu.lora import Adapted
from octavo.executors.residents import Span as Span
from octavo.executors.residents import slots_of
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
    repeat the last; `writes` are the pool rows of the real ones, [2, Hkv, tokens] flattened. `adapted` are the rows
    that have adapters."""

    tokens: int
    ids: Tensor
    positions: Tensor
    writes: Tensor
    gathers: list[Gather]
    order: Tensor
    adapted: Sequence[Adapted] = ()


class Piece(NamedTuple):
    """Tokens at positions [start, end), which are `rows` of the step, and the pool's slots of positions [0, end)."""

    rows: Indices
    start: int
    slots: Indices

    @property
    def end(self) -> int:
        return len(self.slots)


def build(spans: list[Span], rows: int, tile_sizes: tuple[int, ...], shape: PoolShape) -> Layout:
    """Lay out `spans` over `rows` rows. Query tiles take one of `tile_sizes` (ascending)."""
    tokens = sum(len(span.ids) for span in spans)
    ids = np.concatenate([np.asarray(span.ids, dtype=np.int64) for span in spans])
    positions = np.concatenate([np.asarray(span.positions, dtype=np.int64) for span in spans])
    gathers, order = attention(pieces_of(spans, shape), rows, tile_sizes, shape)
    return Layout(
        tokens,
        _padded(ids, rows),
        _padded(positions, rows),
        writes(spans, shape),
        gathers,
        order,
    )


def writes(spans: Sequence[Span], shape: PoolShape) -> Tensor:
    """Pool rows [2, Hkv, tokens] of the tokens' own keys and values, flattened."""
    cells = (np.asarray(span.cells, dtype=np.int64) for span in spans)
    slots = np.concatenate(
        [slots_of(span.table, mine, shape.block_size) for span, mine in zip(spans, cells, strict=True)]
    )
    return torch.from_numpy(np.stack([shape.expand(slots, 0), shape.expand(slots, 1)]).reshape(-1))


def pieces_of(spans: Sequence[Span], shape: PoolShape) -> list[Piece]:
    """Of spans whose tokens are the rows of a step, one after another."""
    pieces: list[Piece] = []
    row = 0
    for span in spans:
        pieces += [_whole(span, row, shape)] if span.paths is None else _branches(span, row, shape)
        row += len(span.ids)
    return pieces


def attention(
    pieces: list[Piece], rows: int, tile_sizes: tuple[int, ...], shape: PoolShape
) -> tuple[list[Gather], Tensor]:
    """The gathers of pieces that are the first of `rows` rows together, and where each row's result is."""
    tokens = sum(len(piece.rows) for piece in pieces)
    gathers: list[Gather] = []
    sources = np.empty(rows, dtype=np.int64)
    at = 0
    for group in _groups(pieces, tile_sizes):
        gather, which = _gather([pieces[i] for i in group], tile_sizes, shape)
        gathers.append(gather)
        for source, target in which:
            sources[target] = source + at
        at += sum(len(tile.queries) for tile in gather.tiles)
    sources[tokens:] = sources[tokens - 1]
    return gathers, torch.from_numpy(sources)


def _whole(span: Span, row: int, shape: PoolShape) -> Piece:
    rows = row + np.arange(len(span.ids))
    return Piece(rows, span.start, slots_of(span.table, np.arange(span.end), shape.block_size))


def _branches(span: Span, row: int, shape: PoolShape) -> list[Piece]:
    """Of a tree: each token goes on with the piece that its path ends, if none before it did."""
    chains: list[list[int]] = []
    ends: dict[tuple[int, ...], list[int]] = {}
    paths = [tuple(path) for path in span.paths or ()]
    for i, path in enumerate(paths):
        chain = ends.pop(path[:-1], None)
        if chain is None:
            chains.append(chain := [])
        chain.append(i)
        ends[path] = chain
    trunk = np.arange(span.start)
    return [
        Piece(
            row + np.array(chain),
            span.start + len(paths[chain[0]]) - 1,
            slots_of(span.table, np.concatenate((trunk, np.array(paths[chain[-1]]))), shape.block_size),
        )
        for chain in chains
    ]


def _groups(pieces: list[Piece], tile_sizes: tuple[int, ...]) -> Iterator[list[int]]:
    """Pieces that share a gather: a long one is alone, others go with those of equal tile size and, up to a factor
    of two, equal length."""

    def like(i: int) -> tuple[int, int, int]:
        piece = pieces[i]
        if len(piece.rows) > tile_sizes[-1]:
            return tile_sizes[-1], 0, i
        return _size(len(piece.rows), tile_sizes), (_key_tiles(piece.end) - 1).bit_length(), -1

    for (size, _, _), members in groupby(sorted(range(len(pieces)), key=like), key=like):
        group: list[int] = []
        keys = 0
        for i in members:
            keys = max(keys, _key_tiles(pieces[i].end) * KEYS)
            if group and (len(group) + 1) * size * keys > _MOST_SCORES:
                yield group
                group, keys = [], _key_tiles(pieces[i].end) * KEYS
            group.append(i)
        yield group


def _gather(
    pieces: list[Piece], tile_sizes: tuple[int, ...], shape: PoolShape
) -> tuple[Gather, list[tuple[Indices, Indices]]]:
    """The gather of a group, and which results belong to which of the step's rows: (results, rows) pairs."""
    key_tiles = max(_key_tiles(piece.end) for piece in pieces)
    slots = np.full((len(pieces), key_tiles * KEYS), shape.slots, dtype=np.int64)
    for b, piece in enumerate(pieces):
        slots[b, : piece.end] = piece.slots
    keys = shape.expand(slots, 0)
    values = shape.expand(slots.reshape(len(pieces), key_tiles, KEYS), 1).transpose(2, 0, 1, 3)
    tiles: list[QueryTile] = []
    pairs: list[tuple[Indices, Indices]] = []
    longest = max(len(piece.rows) for piece in pieces)
    results = 0
    for offset in range(0, longest, tile_sizes[-1]):
        size = _size(min(longest - offset, tile_sizes[-1]), tile_sizes)
        queries = np.empty((len(pieces), size), dtype=np.int64)
        seen = np.empty((len(pieces), size), dtype=np.int64)
        for b, piece in enumerate(pieces):
            n = min(size, len(piece.rows) - offset)
            within = offset + np.minimum(np.arange(size), n - 1)
            queries[b], seen[b] = piece.rows[within], piece.start + within
            pairs.append((results + b * size + np.arange(n), queries[b, :n]))
        n_tiles = _key_tiles(int(seen.max()) + 1)
        visible = np.arange(n_tiles * KEYS) <= seen[:, :, None]
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))[:, :, None, :]
        tiles.append(QueryTile(torch.from_numpy(queries.reshape(-1)), torch.from_numpy(bias), n_tiles))
        results += queries.size
    rows = torch.from_numpy(np.concatenate([keys.reshape(-1), values.reshape(-1)]))
    return Gather(rows, len(pieces), key_tiles, tiles), pairs


def _size(n: int, tile_sizes: tuple[int, ...]) -> int:
    """The least allowed tile for n queries."""
    return tile_sizes[bisect_left(tile_sizes, n)]


def _key_tiles(keys: int) -> int:
    return -(-keys // KEYS)


def _padded(values: Indices, rows: int) -> Tensor:
    return torch.from_numpy(np.pad(values, (0, rows - len(values)), mode="edge"))
