"""The forward pass of the Llama family on a device: linears by torch, the rest by kernels, KV in a paged pool.

Eager: one launch after another on torch's current stream. Numbers are in `dtype`, sums in fp32. Not batch-invariant:
which kernel a matrix product gets depends on its number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executors.cuda.batch import Batch
from octavo.executors.loading.spec import Model, inverse_frequencies
from octavo.kernels.cuda.launch import Heads, Kernels, Step
from octavo.kernels.cuda.pool import PoolLayout


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attn_norm: Tensor
    qkv: _Linear
    o: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear
    pool: Tensor


class Llama:
    """A model on `kernels.device`, with its KV pool."""

    def __init__(self, model: Model, kernels: Kernels, layout: PoolLayout, dtype: torch.dtype) -> None:
        spec, device = model.spec, kernels.device
        self.spec = spec
        self._kernels = kernels
        self._heads = Heads(spec.heads, dtype, layout, spec.head_dim**-0.5)

        def tensor(name: str) -> Tensor:
            return model.weights[name].to(device=device, dtype=dtype).contiguous()

        def linear(name: str) -> _Linear:
            bias = f"{name}.bias"
            return _Linear(tensor(f"{name}.weight"), tensor(bias) if bias in model.weights else None)

        self._embed, self._norm = tensor("embed"), tensor("norm")
        self._head = _Linear(tensor("head.weight") if "head.weight" in model.weights else self._embed, None)
        self._layers = [
            _Layer(
                tensor(f"{i}.attn_norm"),
                linear(f"{i}.qkv"),
                linear(f"{i}.o"),
                tensor(f"{i}.mlp_norm"),
                linear(f"{i}.gate_up"),
                linear(f"{i}.down"),
                layout.allocate(device),
            )
            for i in range(spec.layers)
        ]
        angles = torch.outer(torch.arange(spec.context).float(), inverse_frequencies(spec.rope, spec.head_dim))
        self._angles = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)

    @property
    def group(self) -> int:
        return self._heads.group

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self._kernels.copy_blocks([layer.pool for layer in self._layers], pairs)

    def hidden(self, batch: Batch) -> Tensor:
        """Write the KV of the batch's tokens and give their last hidden states, [tokens, hidden]."""
        kernels, heads, eps = self._kernels, self._heads, self.spec.norm_eps
        step = Step(
            self._device(batch.positions),
            self._device(batch.slots),
            torch.arange(len(batch.ids), dtype=torch.int32, device=kernels.device),
            self._device(batch.tables),
        )
        plans = [kernels.stage(plan, heads) for plan in (batch.decodes, batch.prefills) if len(plan.works)]
        residual = self._embed[self._device(batch.ids)]
        x = kernels.add_rmsnorm(residual, None, self._layers[0].attn_norm, eps)
        following = [*(layer.attn_norm for layer in self._layers[1:]), self._norm]
        for layer, norm in zip(self._layers, following, strict=True):
            q = kernels.append_kv(heads, step, layer.qkv(x), layer.pool, self._angles)
            mixed = torch.empty_like(q)
            for plan in plans:
                kernels.attention(heads, step, plan, q, layer.pool, mixed)
            x = kernels.add_rmsnorm(layer.o(mixed.view(len(q), -1)), residual, layer.mlp_norm, eps)
            x = kernels.add_rmsnorm(layer.down(kernels.silu_mul(layer.gate_up(x))), residual, norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocabulary], fp32."""
        return self._head(hidden).float()

    def _device(self, array: object) -> Tensor:
        return torch.as_tensor(array).to(self._kernels.device)
