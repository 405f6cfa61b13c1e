"""Families with layer norms, and weights called as Llama's or GPT-2's or nearly so: StarCoder (1 and 2), Phi,
StableLM, OPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from octavo.core.models.errors import ModelError
from octavo.executors.loading.checkpoint import Names, split_parts
from octavo.executors.loading.rows import Int32s
from octavo.executors.loading.spec import Spec

Config: TypeAlias = Mapping[str, Any]

_APART = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _only(config: Config, **values: object) -> None:
    """Raises `ModelError` for a key that says something else."""
    for key, known in values.items():
        if (said := config.get(key, known)) != known:
            raise ModelError(f"the {config['model_type']} model's {key} is {said!r}; known is {known!r}")


def starcoder2(config: Config) -> dict[str, Any]:
    windows = (int(config.get("sliding_window") or 0),) * int(config["num_hidden_layers"])
    eps = float(config.get("norm_epsilon", 1e-5))
    return {"gated": False, "layer_norm": True, "norm_eps": eps, "windows": windows if any(windows) else ()}


STARCODER2 = Names(
    embed="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{i}.",
    parts={"qkv": (_APART,), "o": (("self_attn.o_proj",),), "up": (("mlp.c_fc",),), "down": (("mlp.c_proj",),)},
    norms={"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
)


def phi(config: Config) -> dict[str, Any]:
    _only(config, qk_layernorm=False)
    return {"gated": False, "layer_norm": True, "parallel": True, "norm_eps": float(config.get("layer_norm_eps", 1e-5))}


PHI = Names(
    embed="model.embed_tokens",
    norm="model.final_layernorm",
    head="lm_head",
    layer="model.layers.{i}.",
    parts={"qkv": (_APART,), "o": (("self_attn.dense",),), "up": (("mlp.fc1",),), "down": (("mlp.fc2",),)},
    norms={"attn_norm": "input_layernorm", "mlp_norm": "input_layernorm"},
)


def stablelm(config: Config) -> dict[str, Any]:
    _only(config, qk_layernorm=False)
    eps, parallel = float(config.get("layer_norm_eps", 1e-5)), bool(config.get("use_parallel_residual", False))
    return {"layer_norm": True, "parallel": parallel, "norm_eps": eps}


def stablelm_names(spec: Spec) -> Names:
    return Names(
        embed="model.embed_tokens",
        norm="model.norm",
        head="lm_head",
        layer="model.layers.{i}.",
        parts={
            "qkv": (_APART,),
            "o": (("self_attn.o_proj",),),
            "gate_up": (("mlp.gate_proj", "mlp.up_proj"),),
            "down": (("mlp.down_proj",),),
        },
        norms={
            "attn_norm": "input_layernorm",
            "mlp_norm": "input_layernorm" if spec.parallel else "post_attention_layernorm",
        },
    )


def opt(config: Config) -> dict[str, Any]:
    _only(
        config, do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True,
        word_embed_proj_dim=config["hidden_size"],
    )  # fmt: skip
    return {"gated": False, "layer_norm": True, "learned_positions": True, "norm_eps": 1e-5} | _unturned(config)


def _unturned(config: Config) -> dict[str, Any]:
    return {"rotations": (-1,) * int(config["num_hidden_layers"])}


def _from_third(order: Int32s) -> Int32s:
    """Positions are counted from 2."""
    return order[2:]


OPT = Names(
    embed="model.decoder.embed_tokens",
    norm="model.decoder.final_layer_norm",
    head="lm_head",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{i}.",
    parts={"qkv": (_APART,), "o": (("self_attn.out_proj",),), "up": (("fc1",),), "down": (("fc2",),)},
    norms={"attn_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    order={"embed_positions": _from_third},
)


GPT2 = Names(
    embed="transformer.wte",
    norm="transformer.ln_f",
    head="lm_head",
    positions="transformer.wpe",
    layer="transformer.h.{i}.",
    parts={
        "qkv": (("attn.c_attn",),),
        "o": (("attn.c_proj",),),
        "up": (("mlp.c_fc",),),
        "down": (("mlp.c_proj",),),
    },
    norms={"attn_norm": "ln_1", "mlp_norm": "ln_2"},
)


def gpt_bigcode(config: Config) -> dict[str, Any]:
    _only(config, scale_attn_weights=True)
    facts = {"kv_heads": 1} if config.get("multi_query", True) else {}
    eps = float(config.get("layer_norm_epsilon", 1e-5))
    return {"gated": False, "layer_norm": True, "learned_positions": True, "norm_eps": eps} | facts | _unturned(config)


def gpt_bigcode_names(spec: Spec) -> Names:
    """GPT-2's; of one head for keys and values its parts lie one after the other already."""
    return replace(GPT2, order={"c_attn": partial(split_parts, heads=spec.heads)}) if spec.kv_heads > 1 else GPT2
