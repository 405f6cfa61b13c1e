"""The forward pass of a decoder on a device: linears by torch, the rest by kernels, KV in a paged pool.

    embed → ( norm·qkv → append → attend → o·add → norm·MLP·add ) per layer → norm → head

What a `Spec` says beyond Llama changes a step of that or adds one. One launch after another on torch's current stream,
with nothing that depends on the values of a step but what lies in its tensors: so a pass over buffers that stay can be
recorded as a graph, if it is `recordable`. Numbers are in `dtype`, sums in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executors.cuda.attention import HeadAttention
from octavo.executors.cuda.expansion import Expansion, expands, reach
from octavo.executors.cuda.experts import Mixture, reads_back
from octavo.executors.cuda.latent import LatentAttention, PerHead
from octavo.executors.cuda.linear import Linear
from octavo.executors.cuda.lora import Adaptable, Adapting
from octavo.executors.loading.rope import angles
from octavo.executors.loading.spec import Model, Spec
from octavo.kernels.cuda.instances import ACTIVATIONS, DECODE_ROWS, Heads
from octavo.kernels.cuda.launch import Kernels, Staged, Step
from octavo.kernels.cuda.plan import TREE
from octavo.kernels.cuda.pool import LatentLayout, PoolLayout

Attention: TypeAlias = HeadAttention | LatentAttention
SAID = 1024
"""Sequences whose tokens stay on the device from a step to the next; a step in which more sample waits."""
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attn_norm: Norm
    attention: Attention
    window: int
    o: Adaptable
    post_attn_norm: Norm | None
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]
    post_mlp_norm: Norm | None


class Decoder:
    """A model on `kernels.device`. Its KV pool is made by `allocate`; before that nothing can be computed."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        dtype: torch.dtype,
        block_size: int,
        *,
        exact: bool,
        kv: torch.dtype | None = None,
        context: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """KV is in `kv`, or as the numbers are. Texts of up to `context` tokens (None: the model's), chunks of up to
        `chunk` (None: whole texts) have memory to be expanded. Raises `ValueError` for shapes that kernels cannot
        have."""
        spec, device = model.spec, kernels.device
        self.spec, self.kernels, self.dtype, self.exact = spec, kernels, dtype, exact
        self._kv = kv or dtype
        self.block_size = block_size
        self.group = spec.heads // spec.kv_heads
        self.windows = sorted({effective_window(spec, i) for i in range(spec.layers)})
        """Of its layers, each once; 0 sees everything."""
        self.adapting = Adapting()
        self.products: list[Adaptable] = []
        """All that adapters may add to."""
        self.pools: list[Tensor] = []
        self.said = torch.zeros(SAID, dtype=torch.int64, device=device)
        """What the last step drew: an id below 0 of the next one is the one that lies so far from its end."""
        self.saturated = torch.zeros(1, dtype=torch.int32, device=device)
        """How many numbers KV in fp8 had no room for, so far and modulo 2³²; 0 where it is in 16 bits."""
        weights = _Weights(model, device, dtype, exact)
        self.embed, self._norm = weights.tensor("embed"), weights.norm("norm")
        self._embed_norm = weights.norm("embed_norm") if spec.embed_norm else None
        self._slopes = torch.tensor(spec.slopes, device=device) if spec.slopes else None
        self._places = weights.tensor("positions.weight") if spec.learned_positions else None
        self._head = weights.linear("head") if weights.has("head.weight") else Linear(self.embed, None, exact)
        turns = [
            torch.from_numpy(table).movedim(0, 1).flatten(1).contiguous().to(device)
            for table in (angles(rope, spec.head_dim, spec.context) for rope in spec.ropes)
        ]
        turns.append(torch.empty(spec.context, 0, device=device))  # the last: layers that rotate nothing
        self.expansion = self._expansion(chunk or spec.context, min(context or spec.context, spec.context))
        """Of latents, for long chunks; None where all are absorbed."""
        self._layers = [
            _Layer(
                weights.norm(f"{i}.attn_norm"),
                self._attend(weights, i, turns[spec.rotation(i)]),
                effective_window(spec, i),
                self._adaptable(weights, f"{i}.o"),
                weights.norm(f"{i}.post_attn_norm") if spec.post_norms else None,
                weights.norm(f"{i}.mlp_norm"),
                self._mlp(weights, i),
                weights.norm(f"{i}.post_mlp_norm") if spec.post_norms else None,
            )
            for i in range(spec.layers)
        ]
        first = self._layers[0].attention
        self.rows = kernels.rows(first.heads) if isinstance(first, HeadAttention) else (DECODE_ROWS,)
        """Packed rows of the works that attention has kernels for."""

    @property
    def trees(self) -> bool:
        """Whether attention can be over trees. A window must not end in one, where keys lie in cells that are not their
        positions; nor are sums over other cells the same to the bit."""
        return not self.exact and all(window == 0 or window >= TREE for window in self.windows)

    @property
    def recordable(self) -> bool:
        """Whether a pass is nothing but launches."""
        return self.exact or self.spec.experts is None or not reads_back(self.kernels.device, self.dtype)

    @property
    def mixed(self) -> int:
        """Numbers that a head mixes of what the pool has."""
        return self.spec.head_dim if self.spec.latent is None else self.spec.latent.rank

    def layout(self, blocks: int) -> PoolLayout | LatentLayout:
        """Of one layer's pool. Raises `ValueError` when kernels cannot have it."""
        if (latent := self.spec.latent) is not None:
            fp8 = self._kv == torch.float8_e4m3fn
            return LatentLayout(blocks, self.block_size, latent.rank, latent.rotated, self.dtype, fp8)
        return PoolLayout(blocks, self.block_size, self.spec.kv_heads, self.spec.head_dim, self._kv)

    def allocate(self, blocks: int) -> None:
        """An empty pool, in place of an earlier one."""
        self.pools = []  # what was there is given back first
        layout = self.layout(blocks)
        self.pools = [layout.allocate(self.kernels.device) for _ in range(self.spec.layers)]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy KV of single tokens from these slots to those, as if all were read before any is written."""
        layout = self.layout(len(self.pools[0]))
        for pool in self.pools:
            layout.move(pool, source, target)

    def hidden(
        self,
        ids: Tensor,
        step: Step,
        plans: Mapping[int, list[Staged]],
        *,
        layers: int | None = None,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Write the KV of the step's tokens and give their last hidden states, [tokens, hidden]. `plans` are by window,
        for each of `windows`. With `layers` only the first so many are computed, as if they were all. Of the layers
        that are `taps`, the input goes there."""
        first = self._layers[:layers]
        residual = self._embedded(ids, step)
        x = self._normed(residual, first[0].attn_norm)
        following = [*(layer.attn_norm for layer in first[1:]), self._norm]
        for i, (layer, pool, norm) in enumerate(zip(first, self.pools[: len(first)], following, strict=True)):
            if taps and i in taps:
                taps[i] = residual.clone()  # it goes on from there in place
            mixed = layer.o(layer.attention(x, step, plans[layer.window], pool))
            if self.spec.parallel:
                x = self._added(mixed + layer.mlp(self._normed(residual, layer.mlp_norm)), residual, norm)
                continue
            x = self._added(self._post(mixed, layer.post_attn_norm), residual, layer.mlp_norm)
            x = self._added(self._post(layer.mlp(x), layer.post_mlp_norm), residual, norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocabulary], fp32."""
        logits, cap = self._head(hidden).float(), self.spec.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def embedded(self, ids: Tensor) -> Tensor:
        """[n] to [n, hidden], whatever their positions."""
        x = self.embed[ids]
        if self._embed_norm is not None:
            x = self._normed(x, self._embed_norm)
        return x * self.spec.embed_scale if self.spec.embed_scale != 1.0 else x

    def _embedded(self, ids: Tensor, step: Step) -> Tensor:
        x = self.embedded(torch.where(ids < 0, self.said[ids.clamp(max=-1)], ids))
        return x if self._places is None else x + self._places[step.positions]

    def _expansion(self, chunk: int, context: int) -> Expansion | None:
        spec, layout = self.spec, self.layout(1)
        if spec.latent is None or not isinstance(layout, LatentLayout) or self.exact or not expands(spec.latent):
            return None
        longest = reach(spec.latent, chunk, context)
        return Expansion(self.kernels, layout, spec.latent, spec.heads, self._scale, longest) if longest else None

    @property
    def _scale(self) -> float:
        """Of scores."""
        return self.spec.score_scale or self.spec.head_dim**-0.5

    def _attend(self, weights: _Weights, i: int, angles: Tensor) -> Attention:
        spec, kernels, eps = self.spec, self.kernels, self.spec.norm_eps
        layout, scale = self.layout(1), self._scale
        if isinstance(layout, PoolLayout):
            return HeadAttention(
                kernels,
                Heads(
                    spec.heads,
                    self.dtype,
                    layout,
                    scale,
                    spec.score_cap,
                    effective_window(spec, i),
                    slopes=self._slopes,
                ),
                self._adaptable(weights, f"{i}.qkv"),
                angles,
                weights.tensor(f"{i}.q_norm") if spec.head_norms else None,
                weights.tensor(f"{i}.k_norm") if spec.head_norms else None,
                eps,
                self.saturated,
                spec.qkv_cap,
            )
        assert spec.latent is not None  # as the layout says
        low, norm = spec.latent.query_rank > 0, weights.tensor(f"{i}.kv_norm")
        inner = weights.in_fp32(f"{i}.kv_norm") if layout.fp8 else None
        return LatentAttention(
            kernels,
            layout,
            spec.latent,
            spec.heads,
            scale,
            eps,
            weights.linear(f"{i}.q_a") if low else None,
            weights.tensor(f"{i}.q_a_norm") if low else None,
            weights.linear(f"{i}.q_b" if low else f"{i}.q"),
            weights.linear(f"{i}.kv_a"),
            norm if inner is None else torch.ones_like(norm),
            weights.per_head(f"{i}.{{}}.uk", spec.heads, inner, of_rows=True),
            weights.per_head(f"{i}.{{}}.uv", spec.heads, inner),
            angles,
            self.expansion,
        )

    def _mlp(self, weights: _Weights, i: int) -> Callable[[Tensor], Tensor]:
        spec = self.spec
        activation = _PLAIN[spec.activation]
        if spec.experts is not None and spec.is_mixture(i):
            each = range(spec.experts.count)
            mixture = Mixture(
                spec.experts,
                weights.linear(f"{i}.router"),
                weights.in_fp32(f"{i}.correction") if spec.experts.sigmoid else None,
                [weights.tensor(f"{i}.{e}.gate_up.weight") for e in each],
                [weights.tensor(f"{i}.{e}.down.weight") for e in each],
                self._gated,
                exact=self.exact,
            )
            if not spec.experts.shared:
                return mixture
            both, back = weights.linear(f"{i}.shared.gate_up"), weights.linear(f"{i}.shared.down")
            return lambda x: mixture(x) + back(self._gated(both(x)))
        down = self._adaptable(weights, f"{i}.down")
        if spec.gated:
            gate_up = self._adaptable(weights, f"{i}.gate_up")
            return lambda x: down(self._gated(gate_up(x)))
        up = self._adaptable(weights, f"{i}.up")
        return lambda x: down(activation(up(x)))

    def _adaptable(self, weights: _Weights, name: str) -> Adaptable:
        self.products.append(Adaptable(weights.linear(name), name, self.adapting))
        return self.products[-1]

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.spec.activation in ACTIVATIONS:
            return self.kernels.gate_mul(gate_up, self.spec.activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return _PLAIN[self.spec.activation](gate) * up

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        if self.spec.layer_norm:
            return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, self.spec.norm_eps)
        return self.kernels.add_rmsnorm(x, None, norm.weight, self.spec.norm_eps)

    def _post(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else self._normed(x, norm)

    def _added(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """The norm of residual + x, which becomes the residual."""
        if self.spec.layer_norm:
            return self._normed(residual.add_(x), norm)
        return self.kernels.add_rmsnorm(x, residual, norm.weight, self.spec.norm_eps)


class _Weights:
    """A model's tensors on a device, by our names."""

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype, exact: bool) -> None:
        self._weights, self._device, self._dtype, self._exact = model.weights, device, dtype, exact

    def has(self, name: str) -> bool:
        return name in self._weights

    def tensor(self, name: str) -> Tensor:
        return self._weights[name].to(device=self._device, dtype=self._dtype).contiguous()

    def in_fp32(self, name: str) -> Tensor:
        return self._weights[name].to(device=self._device, dtype=torch.float32)

    def linear(self, name: str) -> Linear:
        bias = f"{name}.bias"
        return Linear(self.tensor(f"{name}.weight"), self.tensor(bias) if self.has(bias) else None, self._exact)

    def per_head(self, name: str, heads: int, times: Tensor | None = None, *, of_rows: bool = False) -> PerHead:
        """Of matrices [out, in], one a head; their columns, or their rows, `times` so much in fp32, rounded once."""
        names = [f"{name.format(h)}.weight" for h in range(heads)]
        if times is None:
            stacked = torch.stack([self.tensor(one) for one in names])
        else:
            times = times.unsqueeze(1) if of_rows else times
            stacked = torch.stack([(self.in_fp32(one) * times).to(self._dtype) for one in names])
        return PerHead(stacked.transpose(1, 2).contiguous(), self._exact)

    def norm(self, name: str) -> Norm:
        bias = f"{name}.bias"
        return Norm(self.tensor(name), self.tensor(bias) if self.has(bias) else None)


def effective_window(spec: Spec, layer: int) -> int:
    """0 where the window is as long as any text."""
    window = spec.window(layer)
    return 0 if window >= spec.context else window
