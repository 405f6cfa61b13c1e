"""The forward pass of the Llama family, and of those with layer norms, over a paged KV pool, in fp32.

A step is a flat set of tokens, whatever mix of chunks and decodes they come from. Every operation works row by row,
or is one of the two (linears, attention) that are made to; so a token's numbers depend on its own sequence only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executors.adapters import Adapters
from octavo.executors.cpu.layout import Layout, PoolShape, Span, build
from octavo.executors.cpu.linear import Backend, Linear, RowCounts
from octavo.executors.cpu.lora import Adapted, Packed, rows_by_adapter
from octavo.executors.loading.peft import Lora
from octavo.executors.loading.spec import Model, Spec, inverse_frequencies
from octavo.kernels.attention import Scoring, paged_attention


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Choices that keep the bits of a row the same in any company; `probe` finds them."""

    backend: Backend
    rows: RowCounts
    """For the layers' linears."""
    head_rows: RowCounts
    query_tiles: tuple[int, ...]
    """Queries in an attention tile, ascending."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm: _Norm
    qkv: Linear
    o: Linear
    mlp_norm: _Norm
    rise: Linear
    down: Linear


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def token_bytes(spec: Spec) -> int:
    """KV of one token, in fp32."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * 4


class KvPool:
    """KV of all layers, one tensor a layer, zeroed lazily by the system: memory is taken when a block is first used."""

    def __init__(self, shape: PoolShape, layers: int, device: torch.device | None = None) -> None:
        self.shape = shape
        self.layers = [torch.zeros(shape.rows, shape.head_dim, device=device) for _ in range(layers)]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, as if all were read before any is written."""
        size = self.shape.block_size
        within = torch.arange(size)
        self.copy_slots((source[:, None] * size + within).reshape(-1), (target[:, None] * size + within).reshape(-1))

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Likewise the KV of single tokens."""
        planes = (torch.arange(2 * self.shape.kv_heads) * (self.shape.slots + 1))[:, None]
        read, written = (planes + source).reshape(-1), (planes + target).reshape(-1)
        for layer in self.layers:
            layer.index_copy_(0, written.to(layer.device), layer.index_select(0, read.to(layer.device)))


class Llama:
    """A loaded model. Takes the weights: the tensors of `model` may be emptied as they are packed."""

    def __init__(self, model: Model, arithmetic: Arithmetic) -> None:
        spec, weights = model.spec, model.weights
        self.spec = spec
        self.arithmetic = arithmetic

        def linear(name: str) -> Linear:
            return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), arithmetic.backend)

        def norm(name: str) -> _Norm:
            return _Norm(weights[name], weights.get(f"{name}.bias"))

        self._rise = "gate_up" if spec.gated else "up"
        self._activation = _ACTIVATIONS[spec.activation]
        self._scoring = Scoring(slopes=torch.tensor(spec.slopes) if spec.slopes else None)
        self._embed = weights["embed"]
        self._positions = weights.get("positions.weight")
        self._embed_norm = norm("embed_norm") if spec.embed_norm else None
        self._norm = norm("norm")
        self._head = Linear(weights.get("head.weight", self._embed), weights.get("head.bias"), arithmetic.backend)
        self._layers = [
            _Layer(
                norm(f"{i}.attn_norm"),
                linear(f"{i}.qkv"),
                linear(f"{i}.o"),
                norm(f"{i}.mlp_norm"),
                linear(f"{i}.{self._rise}"),
                linear(f"{i}.down"),
            )
            for i in range(spec.layers)
        ]
        angles = torch.outer(torch.arange(spec.context).float(), inverse_frequencies(spec.rope, spec.head_dim))
        self._cos, self._sin = angles.cos(), angles.sin()
        self.adapters: Adapters[Lora, Packed] | None = None
        """Set by whoever has some."""

    def layout(self, spans: list[Span], shape: PoolShape) -> Layout:
        """Raises `AdapterError` for a span whose adapter cannot be had."""
        rows = self.arithmetic.rows.padded(sum(len(span.ids) for span in spans))
        layout = build(spans, rows, self.arithmetic.query_tiles, shape)
        if self.adapters is None:
            return layout
        adapted = [
            Adapted.of(self.adapters.of(span.adapter), mine)
            for span, mine in rows_by_adapter(spans)
            if span.adapter is not None
        ]
        return layout._replace(adapted=adapted)

    def embed(self, ids: Tensor) -> Tensor:
        """[n] to [n, hidden]."""
        return self._embed[ids] * self.spec.embed_scale

    def hidden(
        self, layout: Layout, pool: KvPool, layers: int | None = None, taps: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Write the KV of the step's tokens and give their last hidden states, [tokens, hidden]. With `layers`, the
        first so many stand for all. Of the layers that are `taps`, the input goes there."""
        spec, rows = self.spec, self.arithmetic.rows
        cos, sin = self._cos[layout.positions].unsqueeze(1), self._sin[layout.positions].unsqueeze(1)
        scale = spec.score_scale or spec.head_dim**-0.5
        x = self.embed(layout.ids)
        if self._positions is not None:
            x = x + self._positions[layout.positions]
        if self._embed_norm is not None:
            x = self._normed(x, self._embed_norm)

        def linear(matrix: Linear, name: str, given: Tensor) -> Tensor:
            y = matrix(given, rows)
            for adapted in layout.adapted:
                adapted.add(name, given, y)
            return y

        for i, (layer, kv) in enumerate(zip(self._layers[:layers], pool.layers[:layers], strict=True)):
            if taps is not None and i in taps:
                taps[i] = x[: layout.tokens]
            heads = linear(layer.qkv, f"{i}.qkv", self._normed(x, layer.attn_norm)).view(len(x), -1, spec.head_dim)
            if spec.qkv_cap:
                heads = heads.clamp(-spec.qkv_cap, spec.qkv_cap)
            rotated = heads[:, : spec.heads + spec.kv_heads]
            if spec.rotation(i) >= 0:
                rotated = rotate(rotated, cos, sin)
            keys, values = rotated[: layout.tokens, spec.heads :], heads[: layout.tokens, -spec.kv_heads :]
            new = torch.cat((keys, values), dim=1)
            kv.index_copy_(0, layout.writes, new.transpose(0, 1).reshape(-1, spec.head_dim))
            queries = rotated[:, : spec.heads] * scale
            mixed = paged_attention(queries, kv, layout.gathers, layout.order, spec.kv_heads, self._scoring)
            attended = x + linear(layer.o, f"{i}.o", mixed)
            risen = linear(
                layer.rise, f"{i}.{self._rise}", self._normed(x if spec.parallel else attended, layer.mlp_norm)
            )
            x = attended + linear(layer.down, f"{i}.down", self._activated(risen))
        return self._normed(x, self._norm)[: layout.tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab]."""
        rows = self.arithmetic.head_rows
        padding = rows.padded(len(hidden)) - len(hidden)
        padded = torch.cat((hidden, hidden[-1:].expand(padding, -1))) if padding else hidden
        return self._head(padded.contiguous(), rows)[: len(hidden)]

    def _activated(self, risen: Tensor) -> Tensor:
        if not self.spec.gated:
            return self._activation(risen)
        gate, up = risen.chunk(2, dim=-1)
        return self._activation(gate) * up

    def _normed(self, x: Tensor, norm: _Norm) -> Tensor:
        if self.spec.layer_norm:
            return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, self.spec.norm_eps)
        return F.rms_norm(x, (x.shape[-1],), norm.weight, self.spec.norm_eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, d] by angles [rows, 1, n]; pairs are (i, i + n), what is beyond stays."""
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :])
    return torch.cat(turned, dim=-1)
