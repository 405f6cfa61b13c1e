"""The paged kernel against a dense softmax, and what its exactness rests on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.executors.cpu.layout import PoolShape, Span, build
from octavo.executors.cpu.linear import Backend, Linear, RowCounts
from octavo.executors.cpu.probe import equal_row_counts
from octavo.kernels.attention import fold, paged_attention

HEADS, KV_HEADS, DIM = 6, 2, 16


def dense(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention in float64: q [n, Hq, d] at positions from `start`, keys and values [end, Hkv, d]."""
    group = HEADS // KV_HEADS
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    hidden = torch.arange(len(keys)) > (start + torch.arange(len(q)))[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("tiles", [(16,), (1, 4, 64)])
def test_paged_equals_dense(block_size: int, tiles: tuple[int, ...]) -> None:
    """Chunks longer than a tile, decodes of all lengths, all in one call; what is not theirs in the pool is garbage."""
    torch.manual_seed(0)
    ends = [(0, 1), (0, 130), (127, 128), (128, 129), (200, 205), (77, 300), (599, 600)]
    shape = PoolShape(sum(-(-end // block_size) for _, end in ends) + 3, block_size, KV_HEADS, DIM)
    pool = torch.full((shape.rows, DIM), math.nan)
    planes = pool.view(2, KV_HEADS, shape.slots + 1, DIM)
    planes[:, :, -1] = 0
    blocks = torch.randperm(shape.blocks).tolist()
    spans, expected, queries = [], [], []
    for start, end in ends:
        table = [blocks.pop() for _ in range(-(-end // block_size))]
        slots = [table[p // block_size] * block_size + p % block_size for p in range(end)]
        keys, values, q = (
            torch.randn(end, KV_HEADS, DIM),
            torch.randn(end, KV_HEADS, DIM),
            torch.randn(end - start, HEADS, DIM),
        )
        planes[0, :, slots], planes[1, :, slots] = keys.transpose(0, 1), values.transpose(0, 1)
        spans.append(Span([0] * (end - start), start, table))
        expected.append(dense(q, keys, values, start))
        queries.append(q)
    flat = torch.cat(queries)
    layout = build(spans, len(flat), tiles, shape)
    out = paged_attention(flat, pool, layout.gathers, layout.order, KV_HEADS)
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=0)


def test_folding_appended_zeros_changes_no_bit() -> None:
    x = torch.randn(23, 50, generator=torch.Generator().manual_seed(1))
    for n in range(1, 24):
        for more in (1, 2, 7, 40):
            assert torch.equal(fold(torch.cat((x[:n], torch.zeros(more, 50)))), fold(x[:n]))
        torch.testing.assert_close(fold(x[:n]), x[:n].sum(0))


def test_padded_rows_can_be_cut_into_allowed_counts() -> None:
    rows = RowCounts((2, 8, 32))
    assert [rows.padded(n) for n in (1, 2, 3, 9, 32, 33, 64, 75)] == [2, 2, 8, 32, 32, 34, 64, 96]


class _Fickle(Linear):
    """Differs in the last bit at some row counts, as real libraries do; and at 8 rows by the row's place."""

    def product(self, x: Tensor) -> Tensor:
        y = super().product(x)
        if len(x) in (1, 2):
            y = torch.nextafter(y, torch.full_like(y, math.inf))
        if len(x) == 8:
            y[3] = torch.nextafter(y[3], torch.full_like(y[3], math.inf))
        return y


def test_row_counts_that_differ_in_a_bit_are_never_used() -> None:
    counts = equal_row_counts(_Fickle(torch.eye(24), None, Backend.PLAIN), 24, (1, 2, 4, 8, 32))
    assert counts == {4, 32}
