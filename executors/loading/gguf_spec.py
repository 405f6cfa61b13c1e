"""What a GGUF file of the Llama family says of its model, and its tensors as numbers; without torch.

llama.cpp stores the query and key rows of `llama` models with the two halves of each head interleaved (its rotary
embedding turns neighbours). `qwen2` files keep the original order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile
from octavo.executors.loading.spec import Rope, Spec

Floats: TypeAlias = npt.NDArray[np.float32]

INTERLEAVED = {"llama": True, "qwen2": False}
"""By architecture: those that are known, and how their query and key rows lie."""


def architecture_of(file: GgufFile) -> str:
    """Raises `ModelError` for one that is not of this family."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in INTERLEAVED:
        raise ModelError(
            f"{file.path} is a model of architecture {architecture!r}; this executor runs {', '.join(INTERLEAVED)}"
        )
    return str(architecture)


def spec_of(file: GgufFile, architecture: str, factors: Floats | None) -> Spec:
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


def _rope(file: GgufFile, architecture: str, factors: Floats | None) -> Rope:
    theta = float(file.metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if factors is not None:  # how a file says llama3 scaling: one divisor a frequency
        return Rope(theta, "factors", factors=tuple(factors.tolist()))
    if kind == "none":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", float(file.metadata[f"{architecture}.rope.scaling.factor"]))
    raise ModelError(f"{file.path} scales its rotary embedding by {kind!r}; supported are none, linear and rope_freqs")


def dequantise(file: GgufFile, name: str) -> Floats:
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
    return np.array(values, dtype=np.float32).reshape(tensor.shape)
