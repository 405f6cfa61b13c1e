"""Families that say where a key lies by ALiBi (arXiv 2108.12409): a score loses a slope, one of its head's, for each
token between query and key. BLOOM, MPT, and Falcon, which rotates instead where its config says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.executors.loading.checkpoint import Names, split_parts
from octavo.executors.loading.rows import Int32s
from octavo.executors.loading.spec import Spec

Config: TypeAlias = Mapping[str, Any]


def slopes(heads: int, greatest: float = 8.0) -> tuple[float, ...]:
    """Of a number of heads that is a power of two, powers of one base, down to 2^-greatest; of others, those of the
    power below and every second one of that above."""
    above = 1 << (heads - 1).bit_length()
    every = [2.0 ** (-greatest / above * (i + 1)) for i in range(above)]
    return tuple(every if above == heads else (every[1::2] + every[::2])[:heads])


def _alone(config: Config, slopes: tuple[float, ...], **facts: Any) -> dict[str, Any]:
    """Facts of a model that rotates nothing."""
    return facts | {"slopes": slopes, "rotations": (-1,) * int(config["num_hidden_layers"])}


def _need(config: Config, family: str, **values: tuple[object, ...]) -> None:
    for key, known in values.items():
        if (said := config.get(key)) is not None and said not in known:
            raise ModelError(f"the {family} model's {key} is {said!r}; known is {' or '.join(map(repr, known))}")


def bloom(config: Config) -> dict[str, Any]:
    _need(config, "BLOOM", apply_residual_connection_post_layernorm=(False,))
    return _alone(
        config, slopes(int(config["num_attention_heads"])), gated=False, layer_norm=True, embed_norm=True,
        activation="gelu_tanh", norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
    )  # fmt: skip


def bloom_names(spec: Spec) -> Names:
    return Names(
        embed="transformer.word_embeddings",
        embed_norm="transformer.word_embeddings_layernorm",
        norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{i}.",
        parts=_PARTS,
        norms={"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        order={"query_key_value": partial(split_parts, heads=spec.heads)},
    )


_PARTS = {
    "qkv": (("self_attention.query_key_value",),),
    "o": (("self_attention.dense",),),
    "up": (("mlp.dense_h_to_4h",),),
    "down": (("mlp.dense_4h_to_h",),),
}


def mpt(config: Config) -> dict[str, Any]:
    how: Config = config.get("attn_config") or {}
    norms, gelu = ("low_precision_layernorm", "layernorm"), {"name": "gelu", "approximate": "none"}
    _need(config, "MPT", no_bias=(True,), logit_scale=(None,), norm_type=norms)
    _need(config.get("ffn_config") or {}, "MPT", ffn_type=("mptmlp",), ffn_act_fn=(gelu,))
    _need(
        how, "MPT", attn_type=("multihead_attention",), prefix_lm=(False,), qk_ln=(False,), alibi=(True,),
        rope=(False,), sliding_window_size=(-1,),
    )  # fmt: skip
    given = slopes(int(config["num_attention_heads"]), float(how.get("alibi_bias_max") or 8))
    return _alone(
        config, given, gated=False, layer_norm=True, activation="gelu", qkv_cap=float(how.get("clip_qkv") or 0),
        score_scale=float(how.get("softmax_scale") or 0), norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
    )  # fmt: skip


MPT = Names(
    embed="transformer.wte",
    norm="transformer.norm_f",
    head="lm_head",
    layer="transformer.blocks.{i}.",
    parts={
        "qkv": (("attn.Wqkv",),),
        "o": (("attn.out_proj",),),
        "up": (("ffn.up_proj",),),
        "down": (("ffn.down_proj",),),
    },
    norms={"attn_norm": "norm_1", "mlp_norm": "norm_2"},
)


def falcon(config: Config) -> dict[str, Any]:
    """Its slopes are in bf16 and scaled as scores are. (transformers rounds their products with positions as well.)"""
    heads, new = int(config["num_attention_heads"]), bool(config.get("new_decoder_architecture"))
    kv_heads = int(config.get("num_kv_heads") or heads) if new else heads
    if not new and config.get("multi_query", True):
        kv_heads = 1
    facts = {
        "gated": False,
        "layer_norm": True,
        "kv_heads": kv_heads,
        "parallel": new or bool(config.get("parallel_attn", True)),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
    }
    if not config.get("alibi"):
        return facts
    scale = (int(config["hidden_size"]) // heads) ** -0.5
    return _alone(config, tuple(scale * _in_bf16(slope) for slope in slopes(heads)), **facts)


def _in_bf16(x: float) -> float:
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 256), exponent - 8)


def falcon_names(spec: Spec) -> Names:
    """Norms are called by what they are before: both of attention and MLP, where these are side by side."""
    after = "post_attention_layernorm" if not spec.parallel else "input_layernorm"
    return Names(
        embed="transformer.word_embeddings",
        norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{i}.",
        parts=_PARTS,
        norms={"attn_norm": "input_layernorm", "mlp_norm": after},
        either={"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"},
        order={"query_key_value": partial(_groups, heads=spec.heads, kv_heads=spec.kv_heads)},
    )


def _groups(order: Int32s, heads: int, kv_heads: int) -> Int32s:
    """Rows stored by key head, each with its queries, its key and its value: queries first, then keys, then values."""
    groups = order.reshape(kv_heads, heads // kv_heads + 2, -1)
    return np.concatenate([groups[:, :-2].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)])
