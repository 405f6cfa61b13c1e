"""Latent attention (MLA: DeepSeek-V2, arXiv 2405.04434) on a device: a token's KV is one row for all heads.

Absorbed: a query is taken through its head's `uk` into the space of latents, meets them there, and what it mixes of
them comes out through the head's `uv`; there are no keys of heads. Chunks of prompts that are long enough are expanded
instead (see `expansion`), where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executors.cuda.expansion import Expansion
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
    rotated]: cosines, then sines. `norm` is ones where contents are kept in fp8: its weights are in `into` and `out_of`
    then, so that what is rounded is as great in one dimension as in another."""

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
    expansion: Expansion | None

    def __call__(self, x: Tensor, step: Step, plans: list[Staged], pool: Tensor) -> Tensor:
        """Write the tokens' KV, and give what heads mix: [tokens, heads · values]."""
        kernels, kept = self.kernels, self.latent.kept
        kernels.append_latent(self.layout, step, self.latents(x), pool, self.angles, self.norm, self.eps)
        if self.low is not None and self.low_norm is not None:
            x = kernels.add_rmsnorm(self.low(x), None, self.low_norm, self.eps)
        q = self.queries(x).view(len(x), self.heads, -1)
        turned = _turned(q[..., kept:], self.angles[step.positions])
        if self.expansion is None or self.expansion.now is None:
            return self._absorbed(q, turned, step, plans, pool).reshape(len(x), -1)
        mixed = q.new_empty(len(x), self.heads, self.latent.values)
        if (rest := self.expansion.now.rest) is not None:
            mine, of_rest = rest
            mixed[mine] = self._absorbed(q[mine], turned[mine], of_rest, plans, pool)
        for wave in self.expansion.now.waves:
            whole = torch.cat((q[wave.tokens, :, :kept], turned[wave.tokens]), dim=-1)
            mixed[wave.tokens] = self.expansion.attention(whole, wave, self.into.weight, self.out_of.weight, pool)
        return mixed.view(len(x), -1)

    def _absorbed(self, q: Tensor, turned: Tensor, step: Step, plans: list[Staged], pool: Tensor) -> Tensor:
        """[tokens, heads, values] of the step's tokens."""
        absorbed = torch.cat((self.into(q[..., : self.latent.kept]), turned), dim=-1)
        mixed = torch.empty(len(q), self.heads, self.layout.content, dtype=q.dtype, device=q.device)
        for plan in plans:
            self.kernels.attention_latent(self.layout, step, plan, absorbed, pool, mixed, self.scale)
        return self.out_of(mixed)


def _turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Of [n, heads, d] pairs (i, i + d/2) by [n, d] cosines and sines, in fp32 and rounded once."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
