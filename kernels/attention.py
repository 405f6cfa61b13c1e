"""Paged attention in plain torch whose result for a query does not depend on what else is computed with it.

The KV of a layer is one pool of rows, and a last row of zeros that stands for every position that is not there:

    pool [2 · Hkv · (slots + 1), d]      row ((kv · Hkv) + head) · (slots + 1) + slot     kv 0: keys, 1: values

A *gather* brings the KV of B sequences together, padded to a whole number of key tiles; *query tiles* of a fixed
number of queries work on a prefix of it. Why the arithmetic of a query is the same in any company:

- every matrix product has K = d or K = KEYS, and a row count that was verified to give the same bits as others;
- a maximum is exact in any order; the sum over keys is taken within each key tile, then over tiles by a tree whose
  shape does not change when tiles are appended;
- a key tile past a query's position adds exact zeros.

Nothing here knows blocks, sequences or models: rows, positions and masks come prepared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KEYS = 128
"""Keys in a tile."""


class QueryTile(NamedTuple):
    """`queries` [B · Tq] are rows of q, `bias` [B, Tq, 1, key_tiles · KEYS] is 0 where a query sees a key or -inf."""

    queries: Tensor
    bias: Tensor
    key_tiles: int

    def to(self, device: torch.device) -> QueryTile:
        return QueryTile(self.queries.to(device), self.bias.to(device), self.key_tiles)


class Gather(NamedTuple):
    """The KV of `batch` sequences over `key_tiles` tiles. `rows` index the pool: keys as [Hkv, B, S], then
    values as [key_tiles, Hkv, B, KEYS]."""

    rows: Tensor
    batch: int
    key_tiles: int
    tiles: list[QueryTile]

    def to(self, device: torch.device) -> Gather:
        return Gather(self.rows.to(device), self.batch, self.key_tiles, [tile.to(device) for tile in self.tiles])


class Scoring(NamedTuple):
    """What becomes of scores x. With a `cap`, cap · tanh(x / cap). `slopes` [Hq] are what each loses for every position
    from key to query (ALiBi, arXiv 2108.12409); `sinks` [Hq] logits of keys without values (arXiv 2309.17453)."""

    cap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None


PLAIN = Scoring()


def fold(x: Tensor) -> Tensor:
    """Sum over the first dimension, pairing neighbours; appending zeros there changes nothing."""
    while (n := x.shape[0]) > 1:
        pairs = x[0 : n - 1 : 2] + x[1:n:2]
        x = pairs if n % 2 == 0 else torch.cat((pairs, x[-1:]))
    return x[0]


def paged_attention(
    q: Tensor,
    pool: Tensor,
    gathers: list[Gather],
    order: Tensor,
    kv_heads: int,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Attention for q [rows, Hq, d], already scaled, over `pool`; gives [len(order), Hq · d].

    The tiles' queries, one after another, are the results that `order` picks from."""
    head_dim = q.shape[-1]
    results = []
    for gather in gathers:
        kv = pool.index_select(0, gather.rows).view(2, -1)
        keys = kv[0].view(kv_heads * gather.batch, gather.key_tiles * KEYS, head_dim)
        values = kv[1].view(gather.key_tiles, kv_heads * gather.batch, KEYS, head_dim)
        results += [_tile(q, keys, values, tile, gather.batch, kv_heads, scoring) for tile in gather.tiles]
    return torch.cat(results).index_select(0, order) if len(results) > 1 else results[0].index_select(0, order)


def _tile(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tile: QueryTile,
    batch: int,
    kv_heads: int,
    scoring: Scoring,
) -> Tensor:
    """One query tile of each of B sequences: [B · Tq, Hq · d]."""
    n, heads, head_dim = tile.key_tiles, q.shape[1], q.shape[2]
    group = heads // kv_heads
    queries = q.index_select(0, tile.queries).view(batch, -1, kv_heads, group, head_dim)
    rows = queries.shape[1] * group
    queries = queries.permute(2, 0, 1, 3, 4).reshape(kv_heads * batch, rows, head_dim)
    scores = torch.bmm(queries, keys[:, : n * KEYS].transpose(1, 2))
    if cap := scoring.cap:
        scores.div_(cap).tanh_().mul_(cap)
    by_head = scores.view(kv_heads, batch, -1, group, n * KEYS)
    if scoring.slopes is not None:
        own = (tile.bias == 0).sum(-1, keepdim=True) - 1  # nothing but what comes later is unseen
        by_head.sub_(scoring.slopes.view(kv_heads, 1, 1, group, 1) * (own - torch.arange(n * KEYS)))
    by_head.add_(tile.bias)
    top, sunk = scores.amax(-1, keepdim=True), None
    if (sinks := scoring.sinks) is not None:
        sunk = sinks.view(kv_heads, 1, 1, group).expand(-1, batch, rows // group, -1).reshape(kv_heads * batch, rows, 1)
        top = torch.maximum(top, sunk)
    scores.sub_(top).exp_()
    weights = scores.view(kv_heads * batch, rows, n, KEYS).permute(2, 0, 1, 3).contiguous()
    total = fold(weights.sum(-1)).unsqueeze(-1)
    if sunk is not None:
        total += (sunk - top).exp_()
    mixed = torch.bmm(weights.view(-1, rows, KEYS), values[:n].reshape(-1, KEYS, head_dim))
    out = fold(mixed.view(n, kv_heads * batch, rows, head_dim)) / total
    out = out.view(kv_heads, batch, -1, group, head_dim).permute(1, 2, 0, 3, 4)
    return out.reshape(-1, heads * head_dim)
