"""Cases of latent attention: a pool full of NaN where nothing was written, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.cuda import reference
from octavo.kernels.cuda.instances import DECODE_ROWS
from octavo.kernels.cuda.launch import Kernels, Step
from octavo.kernels.cuda.plan import Query, plan
from octavo.kernels.cuda.pool import LatentLayout
from tests.kernels.bench import trees

LATENTS = [(64, 16, False), (512, 64, False), (128, 16, True), (512, 64, True)]
"""Content, rotated, and whether contents are fp8: of what kernels are made for."""
LATENT_LIMITS = [227 * 1024, 99 * 1024]
"""Shared memory with which stages are two, and with which the largest is left with one."""


@dataclass(frozen=True)
class LatentCase:
    """`lengths` are (query tokens, context length) of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    sizes: tuple[int, int] = (64, 16)
    heads: int = 20
    block_size: int = 16
    split: int = 0
    fp8: bool = False
    tree: bool = False
    """Each sequence's tokens are one, but for the last sequence's."""


CASES = {
    "many heads": LatentCase(((1, 130), (2, 17), (1, 1))),
    "split, blocks of 32": LatentCase(((1, 200), (1, 40)), heads=5, block_size=32, split=80),
    "the usual size": LatentCase(((1, 70),), sizes=(512, 64), heads=16),
    "fp8": LatentCase(((1, 130), (2, 17), (1, 1)), sizes=(128, 16), fp8=True),
    "fp8, split, blocks of 32": LatentCase(((1, 200), (1, 40)), (128, 16), heads=5, block_size=32, split=80, fp8=True),
    "fp8, the usual size": LatentCase(((1, 70),), sizes=(512, 64), heads=16, fp8=True),
    "fp8, trees": LatentCase(((9, 130), (1, 20), (14, 21)), (128, 16), heads=5, fp8=True, tree=True),
    "trees": LatentCase(((9, 130), (1, 20), (14, 21)), heads=5, tree=True),
    "trees, split": LatentCase(((9, 130), (1, 40)), heads=5, split=64, tree=True),
}


def run(kernels: Kernels, case: LatentCase) -> tuple[Tensor, Tensor]:
    """What the kernels give and what they should, [tokens, heads, content]."""
    generator = torch.Generator().manual_seed(7)
    blocks = sum(-(-length // case.block_size) for _, length in case.lengths) + 1
    layout = LatentLayout(blocks, case.block_size, *case.sizes, torch.bfloat16, case.fp8)
    plain = torch.full((blocks * case.block_size, layout.width), torch.nan)
    order = torch.randperm(blocks, generator=generator).int()
    tokens = sum(n for n, _ in case.lengths)
    q = torch.randn(tokens, case.heads, layout.width, generator=generator).bfloat16()
    tables = torch.zeros(len(case.lengths), blocks, dtype=torch.int32)
    queries: list[Query] = []
    positions: list[Tensor] = []
    at = 0
    for i, (n, length) in enumerate(case.lengths):
        used = -(-length // case.block_size)
        tables[i, :used] = order[at : at + used]
        at += used
        here = torch.arange(length)
        slots = tables[i].long()[here // case.block_size] * case.block_size + here % case.block_size
        plain[slots] = torch.randn(length, layout.width, generator=generator)
        queries.append(Query(i, sum(query.tokens for query in queries), n, length))
        positions.append(torch.arange(length - n, length))
    units = torch.tensor([*[layout.unit] * case.sizes[0], *[1.0] * case.sizes[1]])
    pool = layout.pack(plain / units)
    stored, scale = layout.unpack(pool).float() * units, layout.width**-0.5
    place, mask, start = torch.cat(positions), None, None
    if case.tree:
        mask, start, place = trees(case.lengths, generator)
    step = Step(place.int(), torch.empty(0), torch.arange(tokens).int(), tables, mask, start)
    staged = kernels.stage(plan(queries, case.heads, DECODE_ROWS, case.split), 1, case.sizes[0])
    staged.part_out.fill_(torch.nan)
    staged.part_lse.fill_(torch.nan)
    out = torch.full((tokens, case.heads, case.sizes[0]), torch.nan).bfloat16()
    kernels.attention_latent(layout, step, staged, q, pool, out, scale)
    keys = stored.unsqueeze(1)
    values = torch.nn.functional.pad(keys[..., : case.sizes[0]], (0, case.sizes[1]))
    expected = reference.attention(
        q,
        torch.stack((keys, values)),
        tables,
        queries,
        block_size=case.block_size,
        scale=scale,
        tree=None if mask is None or start is None else (mask, start),
        positions=place,
    )
    return out, expected[..., : case.sizes[0]]
