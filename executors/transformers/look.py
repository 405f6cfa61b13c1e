"""What a model of the transformers library has its attention do, found out by running it once without any.

Its layers hand queries, keys and values to whoever is registered (`AttentionInterface`), and ask another table
(`AttentionMaskInterface`) for masks, to which they give the rule behind each: windows and chunks are then known at any
length, though the run has two tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from octavo.core.models.errors import ModelError

Rule: TypeAlias = Callable[[int, int, Tensor, Tensor], Tensor]
"""Of batch, head, query's and key's positions: whether the one sees the other."""
_CAUSAL: Any = causal_mask_function
_NAME = "octavo-look"


class Seen(NamedTuple):
    """By layer, heads of queries to one of keys; heads of keys in the layer that has most, and the largest size of a
    key or value. By layer, the rule of what a token sees; None where it is all up to itself."""

    groups: tuple[int, ...]
    kv_heads: int
    head_dim: int
    rules: tuple[Rule | None, ...]


class _Call(NamedTuple):
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rule: Rule | None


def layer_of(module: nn.Module) -> int:
    return int(getattr(module, "layer_idx"))  # noqa: B009 - nn.Module types it as a Tensor


def body(model: PreTrainedModel) -> tuple[nn.Module, str, nn.Module]:
    """What of it gives the last hidden states: the module that has it, its name there, and itself."""
    inner: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    if inner is model or isinstance(inner, nn.Linear):  # which are called what is looked for
        inner = getattr(model, "model", model)
    for owner in model.modules():
        for name, child in owner.named_children():
            if child is inner:
                return owner, name, inner
    raise ModelError(f"this {model.config.model_type} model has no part apart from its head that is its decoder")


def look(model: PreTrainedModel) -> Seen:
    """Raises `ModelError` for a model that does not let others do its attention, that lets tokens see later ones, or
    that makes masks of its own."""
    kind, config = model.config.model_type, model.config.get_text_config()
    if getattr(config, "index_topk", None):
        raise ModelError(
            f"this {kind} model picks which {config.index_topk} tokens each one sees, which is not known here"
        )
    rules: dict[int, Rule] = {}
    masks: list[Tensor] = []
    calls: list[_Call] = []

    def mask(*, q_length: int, kv_length: int, mask_function: Rule, **_: Any) -> Tensor:
        made = torch.zeros(1, 1, q_length, kv_length)
        masks.append(made)  # so that no other gets its place
        rules[made.untyped_storage().data_ptr()] = mask_function
        return made

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        if getattr(module, "layer_idx", None) is None:
            raise ModelError(f"this {kind} model attends in a part of no one layer")
        layer, window = layer_of(module), named.get("sliding_window")
        rule: Rule | None = None
        if attention_mask is not None:
            if (rule := rules.get(attention_mask.untyped_storage().data_ptr())) is None:
                raise ModelError(f"layer {layer} of this {kind} model attends by a mask of its own making")
        elif window is not None:
            rule = sliding_window_causal_mask_function(window)
        if rule is _CAUSAL:
            rule = None
        elif rule is not None and bool(rule(0, 0, torch.tensor(0), torch.tensor(1))):
            raise ModelError(f"layer {layer} of this {kind} model lets tokens see later ones: it is no decoder")
        calls.append(_Call(layer, query.shape[1], key.shape[1], max(key.shape[-1], value.shape[-1]), rule))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    model.set_attn_implementation(_NAME)
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    layers = sorted(call.layer for call in calls)
    if len(set(layers)) != len(layers):
        raise ModelError(f"this {kind} model attends more than once in a layer")
    if not layers or layers != list(range(len(calls))) or len(calls) != _count(model):
        raise ModelError(
            f"of this {kind} model's {_count(model)} layers {_count(model) - len(calls)} do not let others do their "
            "attention, or have none: what they keep of a text is not known here"
        )
    calls.sort()
    return Seen(
        tuple(call.heads // call.kv_heads for call in calls),
        max(call.kv_heads for call in calls),
        max(call.head_dim for call in calls),
        tuple(call.rule for call in calls),
    )


def _count(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)
