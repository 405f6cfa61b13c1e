"""Load a GGUF file of the Llama family, whatever its quantisation, as fp32 weights in our layout.

llama.cpp stores the query and key rows of `llama` models with the two halves of each head interleaved (its rotary
embedding turns neighbours); that is undone here. `qwen2` files keep the original order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile
from octavo.executors.loading.fingerprint import fingerprint
from octavo.executors.loading.spec import Model, Rope, Spec, Weights, check

_INTERLEAVED = {"llama": True, "qwen2": False}
_PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


def load_gguf(path: Path) -> Model:
    """Raises `ModelError` when the file holds no model of this family, or not all of it."""
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _INTERLEAVED:
        raise ModelError(
            f"{path} is a model of architecture {architecture!r}; this executor runs {', '.join(_INTERLEAVED)}"
        )
    used: set[str] = set()

    def read(name: str) -> torch.Tensor | None:
        if name not in file.tensors:
            return None
        used.add(name)
        return dequantise(file, name)

    factors = read("rope_freqs.weight")
    spec = spec_of(file, architecture, factors)
    weights = _weights(spec, read, _INTERLEAVED[architecture])
    check(spec, weights)
    if unused := sorted(file.tensors.keys() - used):
        raise ModelError(f"{path} has {len(unused)} tensors that a plain {architecture} model does not, as {unused[0]}")
    return Model(spec, weights, fingerprint([path]))


def spec_of(file: GgufFile, architecture: str, factors: torch.Tensor | None) -> Spec:
    """The model's shape, from the metadata; `factors` are the file's own RoPE frequency factors, if it has any."""

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{file.path} has no metadata {architecture}.{key}")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if (rotated := int(get("rope.dimension_count", head_dim))) != head_dim:
        raise ModelError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions of a head; only whole heads are supported"
        )
    if (values := int(get("attention.value_length", head_dim))) != head_dim:
        raise ModelError(f"{file.path} has keys of {head_dim} and values of {values} dimensions; they must be equal")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    return Spec(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        layers=int(get("block_count")),
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        inner=int(get("feed_forward_length")),
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        context=int(get("context_length")),
        rope=_rope(file, architecture, factors),
    )


def _rope(file: GgufFile, architecture: str, factors: torch.Tensor | None) -> Rope:
    theta = float(file.metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if factors is not None:  # how a file says llama3 scaling: one divisor a frequency
        return Rope(theta, "factors", factors=tuple(factors.tolist()))
    if kind == "none":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(file.metadata[f"{architecture}.rope.scaling.factor"]))
    raise ModelError(f"{file.path} scales its rotary embedding by {kind!r}; supported are none, linear and rope_freqs")


def _weights(spec: Spec, read: Any, interleaved: bool) -> Weights:
    found: dict[str, torch.Tensor | None] = {
        "embed": read("token_embd.weight"),
        "norm": read("output_norm.weight"),
        "head.weight": read("output.weight"),
    }
    for i in range(spec.layers):
        found[f"{i}.attn_norm"] = read(f"blk.{i}.attn_norm.weight")
        found[f"{i}.mlp_norm"] = read(f"blk.{i}.ffn_norm.weight")
        for ours, theirs in _PARTS.items():
            for kind in ("weight", "bias"):
                parts = [read(f"blk.{i}.{name}.{kind}") for name in theirs]
                there = [part for part in parts if part is not None]
                if len(there) not in (0, len(parts)):
                    raise ModelError(f"block {i} has a {kind} for some of {', '.join(theirs)} but not for all")
                if there and ours == "qkv" and interleaved:
                    there[0] = split_halves(there[0], spec.heads)
                    there[1] = split_halves(there[1], spec.kv_heads)
                found[f"{i}.{ours}.{kind}"] = torch.cat(there) if there else None
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def split_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving: within each head, even rows become its first half and odd rows its second."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def dequantise(file: GgufFile, name: str) -> torch.Tensor:
    """A tensor in fp32, in its row-major shape."""
    tensor = file.tensors[name]
    kind = gguf.GGMLQuantizationType(int(tensor.kind))
    rows = file.data(name).reshape(*tensor.shape[:-1], -1)
    try:
        values = gguf.quants.dequantize(rows, kind)
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: tensor {name} is quantised as {tensor.kind.name}, which cannot be read"
        ) from None
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(tensor.shape))
