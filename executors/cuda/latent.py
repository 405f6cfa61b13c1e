"""Latent attention (MLA: DeepSeek-V2, arXiv 2405.04434) on a device: a token's KV is one row for all heads.

Absorbed, for chunks and decodes alike: a query is taken through its head's `uk` into the space of latents, meets them
there, and what it mixes of them comes out through the head's `uv`. So there is one arithmetic, and no keys of heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executors.cuda.linear import ROWS, Linear
from octavo.executors.loading.spec import Latent
from octavo.kernels.cuda.launch import Kernels, Staged, Step
from octavo.kernels.cuda.pool import LatentLayout


@dataclass(frozen=True, slots=True, eq=False)
class PerHead:
    """A matrix for each head: `weight` [heads, in, out]. Exact ones multiply 64 padded rows at a time, as `Linear`."""

    weight: Tensor
    exact: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[n, heads, in] to [n, heads, out]."""
        if not self.exact:
            return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)
        n = len(x)
        tiles = torch.split(F.pad(x, (0, 0, 0, 0, 0, -n % ROWS)), ROWS)
        return torch.cat([torch.bmm(tile.transpose(0, 1), self.weight).transpose(0, 1) for tile in tiles])[:n]


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """`low`, with its norm, comes before `queries` where those are of low rank. `angles` are fp32 [positions,
    rotated]: cosines, then sines."""

    kernels: Kernels
    layout: LatentLayout
    latent: Latent
    heads: int
    scale: float
    eps: float
    low: Linear | None
    low_norm: Tensor | None
    queries: Linear
    latents: Linear
    norm: Tensor
    into: PerHead
    out_of: PerHead
    angles: Tensor

    def __call__(self, x: Tensor, step: Step, plans: list[Staged], pool: Tensor) -> Tensor:
        """Write the tokens' KV, and give what heads mix: [tokens, heads · values]."""
        kernels, kept = self.kernels, self.latent.kept
        kernels.append_latent(self.layout, step, self.latents(x), pool, self.angles, self.norm, self.eps)
        if self.low is not None and self.low_norm is not None:
            x = kernels.add_rmsnorm(self.low(x), None, self.low_norm, self.eps)
        q = self.queries(x).view(len(x), self.heads, -1)
        turned = _turned(q[..., kept:], self.angles[step.positions])
        absorbed = torch.cat((self.into(q[..., :kept]), turned), dim=-1)
        mixed = torch.empty(len(x), self.heads, self.layout.content, dtype=x.dtype, device=x.device)
        for plan in plans:
            kernels.attention_latent(self.layout, step, plan, absorbed, pool, mixed, self.scale)
        return self.out_of(mixed).reshape(len(x), -1)


def _turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Of [n, heads, d] pairs (i, i + d/2) by [n, d] cosines and sines, in fp32 and rounded once."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
