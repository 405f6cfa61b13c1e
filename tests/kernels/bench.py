"""Attention cases for the kernels: pools full of NaN where nothing was written, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.cuda import reference
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS, Heads
from octavo.kernels.cuda.launch import Kernels, Step
from octavo.kernels.cuda.plan import Query, plan
from octavo.kernels.cuda.pool import PoolLayout


@dataclass(frozen=True)
class Case:
    """`lengths` are (query tokens, context length) of each sequence. With `tree`, its query tokens are nodes of a tree;
    `on_device` has the plan made there."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    split: int = 0
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    tree: bool = False
    on_device: bool = False

    @property
    def spec(self) -> Heads:
        blocks = sum(-(-length // self.block_size) for _, length in self.lengths) + 1
        scales = (0.02, 0.05) if self.kv_dtype.itemsize == 1 else (1.0, 1.0)
        layout = PoolLayout(blocks, self.block_size, self.kv_heads, self.head_dim, self.kv_dtype)
        sinks = torch.linspace(-1, 3, self.heads) if self.sinks else None
        slopes = 0.5 ** torch.arange(1, self.heads + 1) if self.alibi else None
        scale = self.head_dim**-0.5
        return Heads(self.heads, self.dtype, layout, scale, self.soft_cap, self.window, *scales, sinks, slopes)


def run(kernels: Kernels, case: Case, rows: int) -> tuple[Tensor, Tensor]:
    """What the kernels give and what they should, [tokens, heads, head_dim]."""
    spec, generator = case.spec, torch.Generator().manual_seed(len(case.lengths))
    layout = spec.layout
    tokens = sum(n for n, _ in case.lengths)
    q = torch.randn(tokens, case.heads, case.head_dim, generator=generator).to(case.dtype)
    kv = torch.full((2, layout.blocks * case.block_size, case.kv_heads, case.head_dim), torch.nan)
    order = torch.randperm(layout.blocks, generator=generator).int()
    tables = torch.zeros(len(case.lengths), layout.blocks, dtype=torch.int32)
    queries, positions, at, first = [], [], 0, 0
    for i, (n, length) in enumerate(case.lengths):
        blocks = -(-length // case.block_size)
        tables[i, :blocks] = order[at : at + blocks]
        at += blocks
        written = torch.arange(length)
        slots = tables[i].long()[written // case.block_size] * case.block_size + written % case.block_size
        kv[:, slots] = torch.randn(2, length, case.kv_heads, case.head_dim, generator=generator)
        queries.append(Query(i, first, n, length))
        positions.append(torch.arange(length - n, length))
        first += n
    scales = torch.tensor([spec.key_scale, spec.value_scale]).view(2, 1, 1, 1)
    pool = layout.pack(kv / scales)
    stored = layout.unpack(pool).float() * scales

    place, mask, start = torch.cat(positions), None, None
    if case.tree:
        mask, start, place = trees(case.lengths, generator)
    step = Step(place.int(), torch.empty(0), torch.arange(tokens).int(), tables, mask, start)
    made = plan(queries, spec.group, rows, case.split, case.window)
    if case.on_device:
        staged = kernels.room(len(made.works) + 3, len(made.merges) + 2, made.parts, rows, case.kv_heads, case.head_dim)
        lengths = torch.tensor([query.length for query in queries], dtype=torch.int32)
        firsts = torch.tensor([query.first for query in queries] + [tokens], dtype=torch.int32)
        staged.works[:] = torch.tensor([0, 0, 0, 1, 0, 16, -1, 0])  # what lies past the count would show
        staged.merges[:] = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0])
        kernels.plan(staged, lengths, firsts, spec.group, split=case.split, window=case.window)
    else:
        staged = kernels.stage(made, case.kv_heads, case.head_dim)
    staged.part_out.fill_(torch.nan)
    staged.part_lse.fill_(torch.nan)
    out = torch.full_like(q, torch.nan)
    kernels.attention(spec, step, staged, q, pool, out)
    expected = reference.attention(
        q,
        stored,
        tables,
        queries,
        block_size=case.block_size,
        scale=spec.scale,
        soft_cap=case.soft_cap,
        window=case.window,
        sinks=spec.sinks,
        slopes=spec.slopes,
        tree=None if mask is None or start is None else (mask, start),
        positions=place,
    )
    return out, expected


def trees(lengths: tuple[tuple[int, int], ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Masks, starts and positions: each sequence's tokens are nodes, parents before children, and a node's position is
    its depth further than what the tree hangs on. The last sequence is plain."""
    masks: list[int] = []
    starts: list[int] = []
    positions: list[int] = []
    for i, (n, length) in enumerate(lengths):
        before, plain = length - n, i == len(lengths) - 1
        mine: list[int] = []
        depth: list[int] = []
        for node in range(n):
            parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
            mine.append((mine[parent] if parent >= 0 else 0) | 1 << node)
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        masks += [0] * n if plain else [mask - (mask >> 63 << 64) for mask in mine]
        starts += [-1 if plain else before] * n
        positions += [before + (node if plain else depth[node]) for node in range(n)]
    return torch.tensor(masks), torch.tensor(starts, dtype=torch.int32), torch.tensor(positions)


DECODES = {
    "gqa": Case(((1, 130), (1, 17), (1, 1), (2, 77))),
    "mha": Case(((1, 50), (1, 33)), heads=2, kv_heads=2),
    "mqa fp16": Case(((1, 100),), heads=16, kv_heads=1, dtype=torch.float16, kv_dtype=torch.float16),
    "fp8": Case(((1, 130), (1, 17), (2, 40)), kv_dtype=torch.float8_e4m3fn),
    "split": Case(((1, 200), (1, 17), (2, 100)), split=32),
    "window, cap, blocks of 32": Case(((1, 130), (2, 50)), window=40, soft_cap=5.0, block_size=32),
    "fp8 split": Case(((1, 130),), kv_dtype=torch.float8_e4m3fn, split=64, block_size=48),
    "sinks": Case(((1, 130), (1, 3)), sinks=True),
    "sinks, split on the device": Case(((1, 130), (2, 40), (1, 3)), sinks=True, split=48, on_device=True),
    "alibi, cap": Case(((1, 130), (2, 40)), alibi=True, soft_cap=5.0),
    "tree": Case(((8, 90), (3, 20), (2, 33)), tree=True),
    "tree, alibi, split, window": Case(((6, 90), (1, 33)), tree=True, alibi=True, split=32, window=60),
    "tree behind a window's beginning": Case(((48, 190), (1, 33)), tree=True, window=70),
}
PREFILLS = {
    "gqa": Case(((70, 130), (5, 5), (1, 40), (33, 33))),
    "mqa of 3, fp16": Case(((50, 60),), heads=3, kv_heads=1, dtype=torch.float16, kv_dtype=torch.float16),
    "fp8": Case(((40, 75),), kv_dtype=torch.float8_e4m3fn),
    "split, window, cap": Case(((40, 150), (3, 3)), split=64, window=70, soft_cap=5.0, block_size=32),
    "sinks, split on the device": Case(((40, 150), (3, 3)), split=64, window=70, sinks=True, on_device=True),
    "tree of 64, alibi": Case(((64, 150), (40, 75)), tree=True, alibi=True),
}
WGMMAS = {
    "gqa": Case(((70, 130), (5, 5), (1, 40), (33, 33))),
    "stages go round": Case(((40, 700),)),
    "mqa of 3, fp16, heads of 128": Case(((50, 420),), 3, 1, 128, dtype=torch.float16, kv_dtype=torch.float16),
    "split, window, cap": Case(((40, 400), (3, 3)), split=256, window=170, soft_cap=5.0, block_size=32),
    "sinks, split on the device": Case(((40, 150), (3, 3)), split=64, window=70, sinks=True, on_device=True),
    "tree of 64, alibi": Case(((64, 150), (40, 75)), tree=True, alibi=True),
    "heads of 80, split, window": Case(((40, 400), (3, 3)), head_dim=80, split=256, window=170, block_size=32),
    "heads of 96": Case(((40, 420), (30, 77)), head_dim=96),
    "heads of 192": Case(((40, 100),), head_dim=192),
    "heads of 256": Case(((40, 170),), head_dim=256),
}
WIDTHS = {80: torch.bfloat16, 96: torch.bfloat16, 128: torch.bfloat16, 256: torch.bfloat16, 32: torch.float8_e4m3fn}


def wide(head_dim: int) -> Case:
    """A small case for heads of that size, decode and prefill alike."""
    return Case(((2, 37), (3, 20)), heads=2, kv_heads=1, head_dim=head_dim, kv_dtype=WIDTHS[head_dim])


BOTH = {"decode": DECODE_ROWS, "prefill": PREFILL_ROWS}
