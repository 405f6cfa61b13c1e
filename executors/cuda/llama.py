"""The forward pass of the Llama family on a device: linears by torch, the rest by kernels, KV in a paged pool.

One launch after another on torch's current stream, with nothing that depends on the values of a step but what lies in
its tensors: so a pass over buffers that stay can be recorded as a graph. Numbers are in `dtype`, sums in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.executors.cuda.linear import Linear
from octavo.executors.loading.spec import Model, inverse_frequencies
from octavo.kernels.cuda.instances import Heads
from octavo.kernels.cuda.launch import Kernels, Staged, Step
from octavo.kernels.cuda.pool import PoolLayout


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attn_norm: Tensor
    qkv: Linear
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A model on `kernels.device`. Its KV pool is made by `allocate`; before that nothing can be computed."""

    def __init__(self, model: Model, kernels: Kernels, dtype: torch.dtype, block_size: int, *, exact: bool) -> None:
        spec, device = model.spec, kernels.device
        self.spec, self.kernels, self.dtype, self.exact = spec, kernels, dtype, exact
        self.block_size = block_size
        self.group = spec.heads // spec.kv_heads
        self.pools: list[Tensor] = []

        def tensor(name: str) -> Tensor:
            return model.weights[name].to(device=device, dtype=dtype).contiguous()

        def linear(name: str) -> Linear:
            bias = f"{name}.bias"
            return Linear(tensor(f"{name}.weight"), tensor(bias) if bias in model.weights else None, exact)

        self.embed, self._norm = tensor("embed"), tensor("norm")
        self._head = Linear(tensor("head.weight") if "head.weight" in model.weights else self.embed, None, exact)
        self._layers = [
            _Layer(
                tensor(f"{i}.attn_norm"),
                linear(f"{i}.qkv"),
                linear(f"{i}.o"),
                tensor(f"{i}.mlp_norm"),
                linear(f"{i}.gate_up"),
                linear(f"{i}.down"),
            )
            for i in range(spec.layers)
        ]
        angles = torch.outer(torch.arange(spec.context).float(), inverse_frequencies(spec.rope, spec.head_dim))
        self._angles = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)

    def layout(self, blocks: int) -> PoolLayout:
        """Of one layer's pool. Raises `ValueError` when kernels cannot have it."""
        return PoolLayout(blocks, self.block_size, self.spec.kv_heads, self.spec.head_dim, self.dtype)

    def allocate(self, blocks: int) -> None:
        """An empty pool, in place of an earlier one."""
        self.pools = []  # what was there is given back first
        layout = self.layout(blocks)
        self._heads = Heads(self.spec.heads, self.dtype, layout, self.spec.head_dim**-0.5)
        self.pools = [layout.allocate(self.kernels.device) for _ in range(self.spec.layers)]

    def hidden(self, ids: Tensor, step: Step, plans: list[Staged]) -> Tensor:
        """Write the KV of the step's tokens and give their last hidden states, [tokens, hidden]."""
        kernels, heads, eps = self.kernels, self._heads, self.spec.norm_eps
        residual = self.embed[ids]
        x = kernels.add_rmsnorm(residual, None, self._layers[0].attn_norm, eps)
        following = [*(layer.attn_norm for layer in self._layers[1:]), self._norm]
        for layer, pool, norm in zip(self._layers, self.pools, following, strict=True):
            q = kernels.append_kv(heads, step, layer.qkv(x), pool, self._angles)
            mixed = torch.empty_like(q)
            for plan in plans:
                kernels.attention(heads, step, plan, q, pool, mixed)
            x = kernels.add_rmsnorm(layer.o(mixed.view(len(q), -1)), residual, layer.mlp_norm, eps)
            x = kernels.add_rmsnorm(layer.down(kernels.gate_mul(layer.gate_up(x))), residual, norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocabulary], fp32."""
        return self._head(hidden).float()
