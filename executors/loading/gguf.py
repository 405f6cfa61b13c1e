"""Load a GGUF file of the Llama family, whatever its quantisation, as fp32 weights in our layout.

The interleaving of query and key rows (see `gguf_spec`) is undone here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile
from octavo.executors.loading.fingerprint import fingerprint
from octavo.executors.loading.gguf_spec import INTERLEAVED, architecture_of, dequantise, spec_of
from octavo.executors.loading.spec import Model, Spec, Weights, check

_PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


def load_gguf(path: Path) -> Model:
    """Raises `ModelError` when the file holds no model of this family, or not all of it."""
    file = GgufFile(path)
    architecture = architecture_of(file)
    used: set[str] = set()

    def read(name: str) -> torch.Tensor | None:
        if name not in file.tensors:
            return None
        used.add(name)
        return torch.from_numpy(dequantise(file, name))

    factors = read("rope_freqs.weight")
    spec = spec_of(file, architecture, None if factors is None else factors.numpy())
    weights = _weights(spec, read, INTERLEAVED[architecture])
    check(spec, weights)
    if unused := sorted(file.tensors.keys() - used):
        raise ModelError(f"{path} has {len(unused)} tensors that a plain {architecture} model does not, as {unused[0]}")
    return Model(spec, weights, fingerprint([path]))


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
