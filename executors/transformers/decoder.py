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

from octavo.executors.cpu.layout import Layout, PoolShape, Span, build
from octavo.executors.cpu.linear import Linear
from octavo.executors.cpu.llama import Arithmetic, KvPool
from octavo.executors.loading.spec import Spec
from octavo.executors.transformers.look import Rule, body, layer_of
from octavo.kernels.attention import Gather, QueryTile, Scoring, paged_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class RowLinear(nn.Module):
    """In place of a linear layer: pads its rows to a number that is allowed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.linear = Linear(weight, bias, arithmetic.backend)
        self.rows = arithmetic.rows

    @property
    def weight(self) -> Tensor:
        """For those who read it beside."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        missing = self.rows.padded(len(flat)) - len(flat)
        padded = torch.cat((flat, flat[-1:].expand(missing, -1))) if missing else flat
        return self.linear(padded.contiguous(), self.rows)[: len(flat)].view(*x.shape[:-1], -1)


class _Base(nn.Module):
    """The part that gives the last hidden states; gives `given` instead of computing it, if there is any."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.given: Tensor | None = None
        self._kind: type[ModelOutput] = ModelOutput
        """Of its last output: what follows may read fields that only this kind has."""

    def __getattr__(self, name: str) -> Any:
        """Heads may read more of it than its output."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

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
            if isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward:  # others give more
                yield parent, name, child.weight.data, None if child.bias is None else child.bias.data
            elif isinstance(child, Conv1D):
                yield parent, name, child.weight.data.t().contiguous(), child.bias.data


class Decoder:
    """Takes the model over. `spec` has the shape of its KV: narrower heads are padded with zeros."""

    def __init__(
        self, model: PreTrainedModel, spec: Spec, rules: Sequence[Rule | None], arithmetic: Arithmetic
    ) -> None:
        self.spec = spec
        self._rules = rules
        self.arithmetic = arithmetic
        self._one_by_one = arithmetic.rows.counts == (1,)
        self._model = model
        owner, name, inner = body(model)
        for parent, child, weight, bias in list(linears(model)):
            setattr(parent, child, RowLinear(weight, bias, arithmetic))
        self._base = _Base(inner)
        setattr(owner, name, self._base)
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
            self._step = _Step(layout, pool)
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
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As the library calls it: query [1, Hq, rows, d], key and value [1, Hkv, rows, ·]; gives [1, rows, Hq, dv].
        `s_aux` [Hq] are logits of keys without values. Its windows are in the rules."""
        step, layer = self._step, layer_of(module)
        assert step is not None  # the library asks for attention only within `hidden`
        head_dim, heads, width = self.spec.head_dim, query.shape[1], value.shape[-1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        missing = self.spec.kv_heads - key.shape[1]  # in layers that have fewer than others
        more = missing * (heads // key.shape[1])
        query, key, value = (
            F.pad(x, (0, head_dim - x.shape[-1], 0, 0, 0, n))
            for x, n in ((query, more), (key, missing), (value, missing))
        )
        kv = step.pool.layers[layer]
        new = torch.cat((key[0], value[0]))[:, : step.layout.tokens]
        kv.index_copy_(0, step.layout.writes, new.reshape(-1, head_dim))
        sinks = None if s_aux is None else F.pad(s_aux.reshape(-1), (0, more))
        scoring = Scoring(softcap or 0.0, sinks=sinks)
        gathers, order = step.gathers(self._rules[layer]), step.layout.order
        mixed = paged_attention(query[0].transpose(0, 1) * scale, kv, gathers, order, self.spec.kv_heads, scoring)
        return mixed.view(1, -1, heads + more, head_dim)[:, :, :heads, :width], None


class _Step:
    """What one pass is about: its layout, and what of it each rule lets see."""

    def __init__(self, layout: Layout, pool: KvPool) -> None:
        self.layout = layout
        self.pool = pool
        self._gathers: dict[Rule | None, list[Gather]] = {None: layout.gathers}

    def gathers(self, rule: Rule | None) -> list[Gather]:
        if rule not in self._gathers:
            self._gathers[rule] = [
                gather._replace(tiles=[_ruled(tile, rule) for tile in gather.tiles]) for gather in self.layout.gathers
            ]
        return self._gathers[rule]


def _ruled(tile: QueryTile, rule: Rule | None) -> QueryTile:
    assert rule is not None
    positions = (tile.bias == 0).sum(-1, keepdim=True) - 1  # causal: a query sees the positions up to its own
    there = rule(0, 0, positions, torch.arange(tile.bias.shape[-1]))
    return tile._replace(bias=tile.bias.masked_fill(~there, -torch.inf))
