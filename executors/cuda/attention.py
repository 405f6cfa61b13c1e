"""Attention of a layer with keys and values of its heads: writes their KV, and mixes what is in the paged pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.executors.cuda.lora import Adaptable
from octavo.kernels.cuda.instances import Heads
from octavo.kernels.cuda.launch import Kernels, Staged, Step


@dataclass(frozen=True, slots=True, eq=False)
class HeadAttention:
    """`angles` are fp32 [positions, rotated]: cosines, then sines; norms are there where heads are normed."""

    kernels: Kernels
    heads: Heads
    qkv: Adaptable
    angles: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    saturated: Tensor
    """int32 [1]: grows by numbers that KV in fp8 has no room for."""
    cap: float = 0.0
    """Of what `qkv` gives; 0 leaves it."""

    def __call__(self, x: Tensor, step: Step, plans: list[Staged], pool: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, heads · d]."""
        kernels, heads = self.kernels, self.heads
        qkv = self.qkv(x)
        q = kernels.append_kv(
            heads,
            step,
            qkv.clamp(-self.cap, self.cap) if self.cap else qkv,
            pool,
            self.angles,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            eps=self.eps,
            saturated=self.saturated,
        )
        mixed = torch.empty_like(q)
        for plan in plans:
            kernels.attention(heads, step, plan, q, pool, mixed)
        return mixed.view(len(q), -1)
