"""A decoder of the transformers library over a paged KV pool, in fp32, a step's tokens in one flat row.

The library's model runs as it is but for three things: its attention is ours (its `AttentionInterface` hands over
queries, keys and values, already rotated); its linears are `executors.cpu.linear`'s, which give a row the same bits in
any company; and what lies between its last hidden states and its logits can be run by itself. What else it does must
work row by row; `executor` finds out whether it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import ModelOutput

from octavo.core.models.errors import ModelError
from octavo.executors.cpu.layout import Layout, PoolShape, Span, build
from octavo.executors.cpu.linear import Linear
from octavo.executors.cpu.llama import Arithmetic, KvPool
from octavo.executors.loading.spec import Spec
from octavo.kernels.attention import Gather, QueryTile, paged_attention

if TYPE_CHECKING:
    from collections.abc import Iterator


class RowLinear(nn.Module):
    """In place of a linear layer: pads its rows to a number that is allowed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.linear = Linear(weight, bias, arithmetic.backend)
        self.rows = arithmetic.rows

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        missing = self.rows.padded(len(flat)) - len(flat)
        padded = torch.cat((flat, flat[-1:].expand(missing, -1))) if missing else flat
        return self.linear(padded.contiguous(), self.rows)[: len(flat)].view(*x.shape[:-1], -1)


class _Base(nn.Module):
    """The model without its head; gives `given` instead of computing it, if there is any."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.given: Tensor | None = None
        self._kind: type[ModelOutput] = ModelOutput
        """Of its last output: what follows may read fields that only this kind has."""

    def forward(self, *arguments: Any, **named: Any) -> ModelOutput:
        if self.given is not None:
            return self._kind(last_hidden_state=self.given)
        out: ModelOutput = self.inner(*arguments, **named)
        self._kind = type(out)
        return out


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, Tensor | None]]:
    """Every linear layer: its parent, its name there, weight [out, in] and bias."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child.weight.data, None if child.bias is None else child.bias.data
            elif isinstance(child, Conv1D):
                yield parent, name, child.weight.data.t().contiguous(), child.bias.data


class Decoder:
    """Takes the model over. `spec` has the shape of its KV: narrower heads are padded with zeros."""

    def __init__(self, model: PreTrainedModel, spec: Spec, arithmetic: Arithmetic) -> None:
        self.spec = spec
        self.arithmetic = arithmetic
        self._one_by_one = arithmetic.rows.counts == (1,)
        self._model = model
        for parent, name, weight, bias in list(linears(model)):
            setattr(parent, name, RowLinear(weight, bias, arithmetic))
        self._base = _Base(getattr(model, model.base_model_prefix))
        setattr(model, model.base_model_prefix, self._base)
        self._step: _Step | None = None
        name = f"octavo-{id(self)}"  # the library's table is one for the process, and we are bound to this pool
        AttentionInterface.register(name, self._attend)
        model.set_attn_implementation(name)

    def layout(self, spans: list[Span], shape: PoolShape) -> list[Layout]:
        """Passes over the model; one a token where no other way was found to be independent of company."""
        passes = [[span.alone(i)] for span in spans for i in range(len(span.ids))] if self._one_by_one else [spans]
        rows, tiles = self.arithmetic.rows, self.arithmetic.query_tiles
        return [build(each, rows.padded(sum(len(span.ids) for span in each)), tiles, shape) for each in passes]

    def hidden(self, layouts: list[Layout], pool: KvPool, *, taps: dict[int, Tensor] | None = None) -> Tensor:
        """Write the KV of the step's tokens and give their last hidden states, [tokens, hidden]. Of the layers that are
        `taps`, the input goes there."""
        states = []
        tapped: dict[int, list[Tensor]] = {layer: [] for layer in taps or ()}
        for layout in layouts:
            self._step = _Step(layout, pool, self.spec)
            out = self._base(
                input_ids=layout.ids[None], position_ids=layout.positions[None], attention_mask=None, use_cache=False,
                output_hidden_states=bool(taps),
            )  # fmt: skip
            states.append(out["last_hidden_state"][0, : layout.tokens])
            for layer, inputs in tapped.items():
                inputs.append(out["hidden_states"][layer][0, : layout.tokens])
        self._step = None
        if taps is not None:
            taps.update({layer: torch.cat(inputs) for layer, inputs in tapped.items()})
        return torch.cat(states)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab]."""
        rows = [hidden[i : i + 1] for i in range(len(hidden))] if self._one_by_one else [hidden]
        return torch.cat([self._head(row) for row in rows])

    def _head(self, hidden: Tensor) -> Tensor:
        self._base.given = hidden[None]
        try:
            out = self._model(input_ids=torch.zeros(1, len(hidden), dtype=torch.int64), use_cache=False)
        finally:
            self._base.given = None
        logits: Tensor = out.logits[0]
        return logits

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As the library calls it: query [1, Hq, rows, d], key and value [1, Hkv, rows, ·]; gives [1, rows, Hq, dv]."""
        step = self._step
        assert step is not None  # the library asks for attention only within `hidden`
        head_dim, width = self.spec.head_dim, value.shape[-1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = (F.pad(x, (0, head_dim - x.shape[-1])) for x in (query, key, value))
        kv = step.pool.layers[int(getattr(module, "layer_idx"))]  # noqa: B009 - nn.Module types it as a Tensor
        new = torch.cat((key[0], value[0]))[:, : step.layout.tokens]
        kv.index_copy_(0, step.layout.writes, new.reshape(-1, head_dim))
        queries = query[0].transpose(0, 1) * scale
        gathers = step.gathers(sliding_window or 0)
        mixed = paged_attention(queries, kv, gathers, step.layout.order, self.spec.kv_heads, cap=softcap or 0.0)
        return mixed.view(1, len(queries), -1, head_dim)[..., :width], None


class _Step:
    """What one pass is about: its layout, and what of it each width of window sees."""

    def __init__(self, layout: Layout, pool: KvPool, spec: Spec) -> None:
        self.layout = layout
        self.pool = pool
        self._gathers = {0: layout.gathers}

    def gathers(self, window: int) -> list[Gather]:
        """With a window, a token sees so many positions, its own included."""
        if window not in self._gathers:
            self._gathers[window] = [
                gather._replace(tiles=[_windowed(tile, window) for tile in gather.tiles])
                for gather in self.layout.gathers
            ]
        return self._gathers[window]


def _windowed(tile: QueryTile, window: int) -> QueryTile:
    seen = (tile.bias == 0).sum(-1, keepdim=True)  # causal: the positions up to its own
    near = torch.arange(tile.bias.shape[-1]) >= seen - window
    return tile._replace(bias=tile.bias.masked_fill(~near, -torch.inf))


def kv_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, key heads and the wider of key's and value's head sizes, as the model's own attention has them.

    Raises `ModelError` for a model that does not let others do its attention, or whose layers differ."""
    calls: list[tuple[int, int, int]] = []

    def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        calls.append((int(getattr(module, "layer_idx")), key.shape[1], max(key.shape[-1], value.shape[-1])))  # noqa: B009
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register("octavo-look", look)
    model.set_attn_implementation("octavo-look")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    layers, shapes = sorted(call[0] for call in calls), {call[1:] for call in calls}
    if layers != list(range(len(calls))) or len(shapes) != 1:
        raise ModelError(
            f"of the {model.config.num_hidden_layers} layers of this {model.config.model_type} model, {len(calls)} let "
            f"others do their attention, of {len(shapes)} shapes; all must, and of one"
        )
    return len(calls), *shapes.pop()
