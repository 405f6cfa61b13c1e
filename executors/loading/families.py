"""What config.json says of a decoder: its `Spec`, and what its folder calls the tensors.

A family is a row of `_FAMILIES`: what of its config goes beyond Llama's, and where its names differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from octavo.core.models.errors import ModelError
from octavo.executors.loading.alibi import MPT, bloom, bloom_names, falcon, falcon_names, mpt
from octavo.executors.loading.checkpoint import Names, split_parts
from octavo.executors.loading.latent import pairs_last
from octavo.executors.loading.layered import (
    GPT2,
    OPT,
    PHI,
    STARCODER2,
    gpt_bigcode,
    gpt_bigcode_names,
    opt,
    phi,
    stablelm,
    stablelm_names,
    starcoder2,
)
from octavo.executors.loading.rope import Rope, yarn_scale
from octavo.executors.loading.spec import MOST_HEADS, MOST_LAYERS, Experts, Latent, Spec

Config: TypeAlias = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip

LLAMA = Names(
    embed="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{i}.",
    parts={
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.qkv_proj",)),
        "o": (("self_attn.o_proj",),),
        "gate_up": (("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_up_proj",)),
        "down": (("mlp.down_proj",),),
    },
    norms={
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    },
)
_GEMMA = replace(LLAMA, norm_offset=1.0)
_GEMMA2 = replace(
    _GEMMA,
    norms={
        "attn_norm": "input_layernorm",
        "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    },
)
_ATTENTION = {name: LLAMA.parts[name] for name in ("qkv", "o")}
_MIXTRAL = replace(
    LLAMA,
    parts=_ATTENTION
    | {
        "router": (("block_sparse_moe.gate",),),
        "{e}.gate_up": (("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),),
        "{e}.down": (("block_sparse_moe.experts.{e}.w2",),),
    },
)
_QWEN3_MOE = replace(
    LLAMA,
    parts=_ATTENTION
    | {
        "router": (("mlp.gate",),),
        "{e}.gate_up": (("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),),
        "{e}.down": (("mlp.experts.{e}.down_proj",),),
    },
)


def _gpt_neox(spec: Spec) -> Names:
    return Names(
        embed="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.{i}.",
        parts={
            "qkv": (("attention.query_key_value",),),
            "o": (("attention.dense",),),
            "up": (("mlp.dense_h_to_4h",),),
            "down": (("mlp.dense_4h_to_h",),),
        },
        norms={"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        order={"query_key_value": partial(split_parts, heads=spec.heads)},
    )


TRANSPOSED = {"gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight")}
"""Matrices that a family stores as [inputs, outputs]."""


def _llama(config: Config) -> dict[str, Any]:
    return {}


def _mistral(config: Config) -> dict[str, Any]:
    return {"windows": _everywhere(config)}


def _qwen(config: Config) -> dict[str, Any]:
    windows: tuple[int, ...] = ()
    if config.get("use_sliding_window") and (window := config.get("sliding_window")):
        first = int(config.get("max_window_layers", 0))
        windows = _by_type(config, [window if i >= first else 0 for i in range(int(config["num_hidden_layers"]))])
    return {"windows": windows}


def _qwen3(config: Config) -> dict[str, Any]:
    return _qwen(config) | {"head_norms": True}


def _smollm3(config: Config) -> dict[str, Any]:
    layers, interval = int(config["num_hidden_layers"]), int(config.get("no_rope_layer_interval", 4))
    turned = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    return _qwen(config) | {"rotations": tuple(0 if turns else -1 for turns in turned)}


def _gemma(config: Config) -> dict[str, Any]:
    # Files of Gemma 1 name an activation that was never used (`hidden_act`).
    return {
        "activation": _ACTIVATIONS.get(config.get("hidden_activation") or "gelu_pytorch_tanh", ""),
        "embed_scale": math.sqrt(config["hidden_size"]),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    layers, window = int(config["num_hidden_layers"]), int(config.get("sliding_window") or 0)
    return _gemma(config) | {
        "post_norms": True,
        "score_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "score_cap": float(config.get("attn_logit_softcapping") or 0),
        "logit_cap": float(config.get("final_logit_softcapping") or 0),
        "windows": _by_type(config, [0 if i % 2 else window for i in range(layers)]),
    }


def _gemma3(config: Config) -> dict[str, Any]:
    layers, window = int(config["num_hidden_layers"]), int(config.get("sliding_window") or 0)
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    windows = _by_type(config, [window if (i + 1) % pattern else 0 for i in range(layers)])
    return _gemma2(config) | {
        "head_norms": True,
        "windows": windows,
        "rotations": tuple(1 if window else 0 for window in windows),
    }


def _gpt_neox_facts(config: Config) -> dict[str, Any]:
    return {
        "gated": False,
        "layer_norm": True,
        "parallel": bool(config.get("use_parallel_residual", True)),
        "norm_eps": float(config.get("layer_norm_eps", 1e-5)),
    }


def _gpt2_facts(config: Config) -> dict[str, Any]:
    if config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True):
        raise ModelError("the model scales its attention scores in a way that is not known here")
    return {
        "gated": False,
        "layer_norm": True,
        "learned_positions": True,
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "rotations": (-1,) * int(config["n_layer"]),
    }


def _mixtral(config: Config) -> dict[str, Any]:
    experts = Experts(
        int(config["num_local_experts"]), int(config["num_experts_per_tok"]), int(config["intermediate_size"]), True
    )
    return _mistral(config) | {"experts": experts}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step", 1)) != 1:
        raise ModelError("the model mixes layers with and without experts, which is not known here")
    experts = Experts(
        int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
        int(config["num_experts_per_tok"]),
        int(config["moe_intermediate_size"]),
        bool(config.get("norm_topk_prob", False)),
    )
    return _qwen3(config) | {"experts": experts}


def _deepseek(config: Config) -> dict[str, Any]:
    """Its attention keeps latents; what scales its scores beyond the heads' size comes with yarn (`mscale_all_dim`)."""
    latent = Latent(
        int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"]),
        int(config["v_head_dim"]), int(config.get("q_lora_rank") or 0),
    )  # fmt: skip
    if odd := [n for n in (latent.rank, latent.rotated, latent.values) if n % 16]:
        raise ModelError(f"latents, rotated keys and values of {odd[0]} numbers are not whole vectors of 16")
    given, scale = config.get("rope_parameters") or config.get("rope_scaling") or {}, 1.0
    if (given.get("rope_type") or given.get("type") or "default") != "default" and given.get("mscale_all_dim"):
        scale = yarn_scale(float(given["factor"]), float(given["mscale_all_dim"]))
    return {
        "latent": latent,
        "kv_heads": 1,
        "head_dim": latent.rank + latent.rotated,
        "rotated": latent.rotated,
        "score_scale": (latent.kept + latent.rotated) ** -0.5 * scale * scale,
    }


def _deepseek_experts(config: Config, *, normed: bool, grouped: bool, sigmoid: bool = False) -> Experts | None:
    if not config.get("n_routed_experts"):
        return None
    inner = int(config["moe_intermediate_size"])
    return Experts(
        int(config["n_routed_experts"]), int(config["num_experts_per_tok"]), inner, normed=normed,
        scale=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config["n_group"]) if grouped else 0, groups_used=int(config["topk_group"]) if grouped else 0,
        dense=int(config.get("first_k_dense_replace") or 0),
        shared=inner * int(config.get("n_shared_experts") or 0), sigmoid=sigmoid,
    )  # fmt: skip


def _known(config: Config, **values: tuple[object, ...]) -> None:
    for key, known in values.items():
        if (said := config.get(key)) is not None and said not in known:
            raise ModelError(f"the model's {key} is {said!r}; known is {' or '.join(map(repr, known))}")


def _deepseek_v2(config: Config) -> dict[str, Any]:
    methods = ("greedy", "group_limited_greedy")
    _known(config, scoring_func=("softmax",), moe_layer_freq=(1,), norm_topk_prob=(False,), topk_method=methods)
    grouped = config.get("topk_method") == "group_limited_greedy"
    return _deepseek(config) | {"experts": _deepseek_experts(config, normed=False, grouped=grouped)}


def _deepseek_v3(config: Config) -> dict[str, Any]:
    """What it predicts beyond the next token (layers after the last) is left aside."""
    _known(config, scoring_func=("sigmoid",), moe_layer_freq=(1,), topk_method=("noaux_tc",), rope_interleave=(True,))
    normed, grouped = bool(config.get("norm_topk_prob", True)), int(config.get("n_group") or 1) > 1
    return _deepseek(config) | {"experts": _deepseek_experts(config, normed=normed, grouped=grouped, sigmoid=True)}


def _deepseek_names(spec: Spec) -> Names:
    assert spec.latent is not None
    rotated = spec.latent.rotated
    turned = partial(pairs_last, heads=spec.heads, rotated=rotated)
    attention = {
        "q": "q_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj",
        "o": "o_proj",
    }  # fmt: skip
    shared = {
        "shared.gate_up": (("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),),
        "shared.down": (("mlp.shared_experts.down_proj",),),
    }
    mlp = {name: LLAMA.parts[name] for name in ("gate_up", "down")}
    experts = {name: way for name, way in _QWEN3_MOE.parts.items() if name not in _ATTENTION}
    return replace(
        LLAMA,
        parts={ours: ((f"self_attn.{theirs}",),) for ours, theirs in attention.items()} | mlp | experts | shared,
        norms={
            "attn_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "q_a_norm": "self_attn.q_a_layernorm",
            "kv_norm": "self_attn.kv_a_layernorm",
        },
        order={
            "q_proj": turned,
            "q_b_proj": turned,
            "kv_a_proj_with_mqa": partial(pairs_last, heads=1, rotated=rotated),
        },
        correction="mlp.gate.e_score_correction_bias",
    )


_Facts: TypeAlias = Callable[[Config], dict[str, Any]]
_FAMILIES: dict[str, tuple[_Facts, Names | Callable[[Spec], Names]]] = {
    "llama": (_llama, LLAMA),
    "mistral": (_mistral, LLAMA),
    "qwen2": (_qwen, LLAMA),
    "qwen3": (_qwen3, LLAMA),
    "phi3": (_mistral, LLAMA),
    "seed_oss": (_llama, LLAMA),
    "ministral": (_mistral, LLAMA),
    "cwm": (_mistral, LLAMA),
    "smollm3": (_smollm3, LLAMA),
    "gemma": (_gemma, _GEMMA),
    "gemma2": (_gemma2, _GEMMA2),
    "gemma3_text": (_gemma3, _GEMMA2),
    "gpt_neox": (_gpt_neox_facts, _gpt_neox),
    "gpt2": (_gpt2_facts, GPT2),
    "mixtral": (_mixtral, _MIXTRAL),
    "qwen3_moe": (_qwen3_moe, _QWEN3_MOE),
    "deepseek_v2": (_deepseek_v2, _deepseek_names),
    "deepseek_v3": (_deepseek_v3, _deepseek_names),
    "bloom": (bloom, bloom_names),
    "mpt": (mpt, MPT),
    "falcon": (falcon, falcon_names),
    "starcoder2": (starcoder2, STARCODER2),
    "gpt_bigcode": (gpt_bigcode, gpt_bigcode_names),
    "phi": (phi, PHI),
    "stablelm": (stablelm, stablelm_names),
    "opt": (opt, OPT),
}
_OF_GPT2 = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "activation_function": "hidden_act",
}  # fmt: skip
_KEYS: dict[str, dict[str, str]] = {
    "gpt2": _OF_GPT2,
    "gpt_bigcode": _OF_GPT2,
    "opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    "phi": {},
    "stablelm": {},
    "bloom": {
        "n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
    },
    "mpt": {
        "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    },
    "falcon": {"ffn_hidden_size": "intermediate_size", "activation": "hidden_act"},
}  # fmt: skip
"""What families call the keys of `spec_of`, and those they may leave out."""
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "bloom": {"max_position_embeddings": 2048},
    "falcon": {"max_position_embeddings": 2048, "hidden_act": "gelu"},
    "phi": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.25},
}


def names_of(spec: Spec) -> Names:
    names = _FAMILIES[spec.architecture][1]
    return names if isinstance(names, Names) else names(spec)


def spec_of(config: Config, folder: Path) -> Spec:
    """Raises `ModelError` for a family that is not known, or a key that is missing or says what is not known."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise ModelError(
            f"{folder} is a model of type {kind!r}; types that are known are {', '.join(_FAMILIES)} "
            "(for another type, look for an executor that has it)"
        )
    try:
        config = _renamed(config, kind)
        if (layers := int(config["num_hidden_layers"])) > MOST_LAYERS:
            raise ModelError(f"{folder}/config.json says {layers} layers; {MOST_LAYERS} are the most that can be read")
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        if heads > MOST_HEADS:
            raise ModelError(f"{folder}/config.json says {heads} heads; {MOST_HEADS} are the most that can be read")
        named = config.get("hidden_activation") or config.get("hidden_act") or "silu"
        head_dim = int(config.get("head_dim") or hidden // heads)
        rope, local, context = _ropes(config, head_dim, folder)
        facts: dict[str, Any] = {
            "activation": _ACTIVATIONS.get(named, ""),
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "local_rope": local,
        }
        facts |= _FAMILIES[kind][0](config)
        if not facts["activation"]:
            raise ModelError(f"{folder} uses the activation {named!r}; known are {', '.join(_ACTIVATIONS)}")
        return Spec(
            architecture=kind,
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=facts.pop("kv_heads", int(config.get("num_key_value_heads") or heads)),
            head_dim=facts.pop("head_dim", head_dim),
            inner=int(config["intermediate_size"]),
            context=context,
            rope=replace(rope, dims=facts.pop("rotated", rope.dims)),
            **facts,
        )
    except KeyError as error:
        raise ModelError(f"{folder}/config.json has no {error.args[0]!r}") from None


def _renamed(config: Config, kind: str) -> Config:
    """With the keys that `spec_of` reads."""
    if kind not in _KEYS:
        return config
    given = {ours: config[theirs] for theirs, ours in _KEYS[kind].items() if config.get(theirs) is not None}
    made = _LEFT_OUT.get(kind, {}) | dict(config) | given
    if made.get("intermediate_size") is None:
        made["intermediate_size"] = int(made.get("expansion_ratio", 4)) * int(made["hidden_size"])
    return made


def _everywhere(config: Config) -> tuple[int, ...]:
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return ()
    return _by_type(config, [window] * int(config["num_hidden_layers"]))


def _by_type(config: Config, windows: list[int]) -> tuple[int, ...]:
    """`layer_types` say for each layer whether it slides; without them, `windows` are as they are."""
    types = config.get("layer_types")
    if types is None:
        return tuple(windows)
    if unknown := sorted(set(types) - {"sliding_attention", "full_attention"}):
        raise ModelError(f"the model has layers of type {unknown[0]!r}; known are sliding_attention and full_attention")
    window = int(config.get("sliding_window") or 0)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _ropes(config: Config, head_dim: int, folder: Path) -> tuple[Rope, Rope | None, int]:
    """The rotation of most layers, that of sliding ones where it differs, and the longest context.

    transformers 5 writes `rope_parameters`, which Gemma 3 has by layer type; earlier ones wrote `rope_theta`,
    `rope_local_base_freq` and `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in given:
        rope, context = _rope(config, given["full_attention"], head_dim, folder)
        return rope, _rope(config, given["sliding_attention"], head_dim, folder)[0], context
    rope, context = _rope(config, given, head_dim, folder)
    local = config.get("rope_local_base_freq")
    if local is None and config.get("model_type") == "gemma3_text":
        local = 10000.0
    return rope, None if local is None else Rope(float(local)), context


def _rope(config: Config, given: Config, head_dim: int, folder: Path) -> tuple[Rope, int]:
    longest = int(config["max_position_embeddings"])
    part = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or config.get("rotary_pct") or 1.0
    theta = given.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    dims = 0 if part == 1 else int(head_dim * part)
    plain = Rope(float(theta), dims=dims)
    kind = given.get("rope_type") or given.get("type") or "default"
    original = int(
        given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    )
    factor = float(given.get("factor") or 1.0)
    if kind == "default":
        return plain, longest
    if kind == "linear":  # Gemma 3 gives the length that it has scaled already
        scaled = str(config.get("model_type")).startswith("gemma3")
        return replace(plain, kind=kind, factor=factor), longest if scaled else int(longest * factor)
    if kind == "dynamic":
        return replace(plain, kind=kind, factor=factor, original_context=longest), int(longest * factor)
    if kind == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        rope = replace(plain, kind=kind, factor=factor, low_freq_factor=low, high_freq_factor=high)
        return replace(rope, original_context=int(given["original_max_position_embeddings"])), longest
    if kind == "yarn":
        factor = float(given.get("factor") or longest / original)
        mscale, whole = given.get("mscale"), given.get("mscale_all_dim")
        scale = yarn_scale(factor, mscale) / yarn_scale(factor, whole) if mscale and whole else yarn_scale(factor)
        rope = replace(
            plain, kind=kind, factor=factor, original_context=original,
            scale=float(given.get("attention_factor") or scale),
            beta_fast=float(given.get("beta_fast") or 32), beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
        )  # fmt: skip
        return rope, int(original * factor)
    if kind in ("longrope", "su"):  # its long factors would change keys that are cached: texts end where they begin
        stretch = float(given.get("factor") or longest / original)
        scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        rope = replace(plain, kind="factors", factors=tuple(map(float, given["short_factor"])))
        return replace(rope, scale=float(given.get("attention_factor") or scale)), original
    raise ModelError(
        f"{folder} scales its rotary embedding by {kind!r}; "
        "known are default, linear, dynamic, llama3, yarn and longrope"
    )
