"""Load a Hugging Face folder: config.json and safetensors, in one file or sharded. transformers is not needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from octavo.core.models.errors import ModelError
from octavo.executors.loading.fingerprint import fingerprint
from octavo.executors.loading.spec import Model, Rope, Spec, Weights, check

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$")
"""Tensors that a folder may have without use: derived ones, and the head of a model that ties it to its embedding."""
_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def load_folder(folder: Path) -> Model:
    """Raises `ModelError` when the folder holds no model of this family, or not all of it."""
    config = _read_json(folder / "config.json")
    spec = _spec(config, folder)
    files = _tensor_files(folder)
    handles = {path: safe_open(path, framework="pt") for path in set(files.values())}

    used = set()

    def read(name: str) -> torch.Tensor | None:
        if name not in files:
            return None
        used.add(name)
        tensor: torch.Tensor = handles[files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        if not tensor.is_floating_point():
            raise ModelError(f"{folder}: tensor {name} is stored as {tensor.dtype}; quantised folders cannot be read")
        return tensor.to(torch.float32)

    tied = bool(config.get("tie_word_embeddings", False))
    weights = gather_weights(spec, read, tied)
    check(spec, weights)
    if unused := sorted(name for name in files.keys() - used if not _IGNORED.search(name)):
        raise ModelError(
            f"{folder} has {len(unused)} tensors that a {spec.architecture} model does not, as {unused[0]}"
        )
    return Model(spec, weights, fingerprint([folder / "config.json", *sorted(set(files.values()))]))


def gather_weights(spec: Spec, read: Callable[[str], torch.Tensor | None], tied: bool) -> Weights:
    """Our weights from Hugging Face's names; `read` gives None for a tensor that is not there."""
    found: dict[str, torch.Tensor | None] = {
        "embed": read("model.embed_tokens.weight"),
        "norm": read("model.norm.weight"),
        "head.weight": None if tied else read("lm_head.weight"),
    }
    for i in range(spec.layers):
        layer = f"model.layers.{i}."
        found[f"{i}.attn_norm"] = read(layer + "input_layernorm.weight")
        found[f"{i}.mlp_norm"] = read(layer + "post_attention_layernorm.weight")
        for ours, theirs in _PARTS.items():
            for kind in ("weight", "bias"):
                parts = [read(f"{layer}{name}.{kind}") for name in theirs]
                there = [part for part in parts if part is not None]
                if len(there) not in (0, len(parts)):
                    raise ModelError(f"layer {i} has a {kind} for some of {', '.join(theirs)} but not for all")
                found[f"{i}.{ours}.{kind}"] = torch.cat(there) if there else None
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _spec(config: dict[str, Any], folder: Path) -> Spec:
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ModelError(
            f"{folder} is a model of type {kind!r}; this executor runs {', '.join(_ARCHITECTURES)} "
            "(for another type, look for an executor that has it)"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{folder} uses the activation {activation!r}; only silu is supported")
    if config.get("use_sliding_window") or (kind == "mistral" and config.get("sliding_window") is not None):
        raise ModelError(f"{folder} uses sliding-window attention, which this executor does not have")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return Spec(
            architecture=kind,
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            inner=int(config["intermediate_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            context=int(config["max_position_embeddings"]),
            rope=_rope(config, folder),
        )
    except KeyError as error:
        raise ModelError(f"{folder}/config.json has no {error.args[0]!r}") from None


def _rope(config: dict[str, Any], folder: Path) -> Rope:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(scaling["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            int(scaling["original_max_position_embeddings"]),
        )
    raise ModelError(f"{folder} scales its rotary embedding by {kind!r}; supported are default, linear and llama3")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {name: folder / file for name, file in _read_json(index)["weight_map"].items()}
    elif (single := folder / "model.safetensors").is_file():
        with safe_open(single, framework="pt") as handle:
            files = dict.fromkeys(handle.keys(), single)
    else:
        raise ModelError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    if lost := sorted({str(path) for path in files.values() if not path.is_file()}):
        raise ModelError(f"{index} names files that are not there: {', '.join(lost)}; fetch the model again")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    return value
