"""What a token leaves behind in each layer of a model, and how many bytes its weights are: read from config.json or a
GGUF file's metadata. Loads no weight.

    full      every token is kept: keys and values of each KV head (MHA, GQA, MQA by how many heads share one)
    window    only the last `window` tokens are
    latent    every token is kept as one compressed vector and a rotary key (MLA: DeepSeek-V2, arXiv 2405.04434)
    state     a state of fixed size (linear attention, Mamba): no KV that grows
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile
from octavo.core.models.locate import ModelFiles

Attention = Literal["full", "window", "latent", "state"]

PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6}
"""Every how manieth layer attends to everything, in families whose files do not say."""


class Layer(NamedTuple):
    """`values` are numbers kept per token, `window` the tokens kept (None: all). Of the values `rotary` have 16 bits at
    least, whatever the others have: those of a latent's shared key."""

    attention: Attention
    values: int
    window: int | None = None
    rotary: int = 0

    def bytes_in(self, width: float) -> float:
        """Of a token whose numbers have so many bytes."""
        return (self.values - self.rotary) * width + self.rotary * max(2.0, width)


class Shape(NamedTuple):
    """`weights` in bytes as the files have them; `counted` says whether files were counted or it is an estimate.
    `context` is what the model was made for."""

    name: str
    sharing: str
    """MHA, GQA, MQA or MLA."""
    layers: tuple[Layer, ...]
    weights: int
    counted: bool
    parameters: int
    hidden: int
    heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool
    """Whether the output matrix is the embedding."""


def read_shape(files: ModelFiles) -> Shape:
    """Raises `ModelError` for a model that does not say what is needed."""
    if files.path is None:
        raise ModelError("the ghost has no model, and takes no memory for one")
    if files.kind == "gguf":
        return _from_gguf(files.model_id, GgufFile(files.path))
    return _from_folder(files.model_id, files.path)


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────


def _from_gguf(name: str, file: GgufFile) -> Shape:
    about, arch = file.metadata, str(file.metadata.get("general.architecture", ""))

    def get(key: str, otherwise: Any = None) -> Any:
        return about.get(f"{arch}.{key}", otherwise)

    count, heads, hidden = get("block_count"), get("attention.head_count"), get("embedding_length")
    if not count or not heads or not hidden:
        raise ModelError(f"{file.path}: its metadata has no {arch}.block_count, head_count or embedding_length")
    heads = max(heads) if isinstance(heads, list) else heads
    kv_heads = get("attention.head_count_kv", heads)
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * count
    key, value = get("attention.key_length", hidden // heads), get("attention.value_length", hidden // heads)
    latent, window = get("attention.kv_lora_rank"), get("attention.sliding_window")
    pattern = get("attention.sliding_window_pattern", PATTERNS.get(arch, 0))
    layers = []
    for i in range(count):
        if latent:
            layers.append(_latent(latent, get("rope.dimension_count", 64)))
        elif not kv_heads[i]:
            layers.append(Layer("state", 0))
        else:
            layers.append(_kept(kv_heads[i] * (key + value), window if _is_local(pattern, i) else None))
    tensors = file.tensors.values()
    return Shape(
        name=name,
        sharing="MLA" if latent else sharing(heads, max(kv_heads)),
        layers=tuple(layers),
        weights=sum(tensor.nbytes for tensor in tensors),
        counted=True,
        parameters=sum(_size(tensor.shape) for tensor in tensors),
        hidden=hidden,
        heads=heads,
        head_dim=key,
        vocab=get("vocab_size") or len(about.get("tokenizer.ggml.tokens", ())),
        context=get("context_length", 0),
        tied="output.weight" not in file.tensors,
    )


def _is_local(pattern: Any, layer: int) -> bool:
    """`pattern` is a truth value a layer, or every how manieth attends to everything (0: none does)."""
    if isinstance(pattern, list):
        return bool(pattern[layer])
    return not pattern or (layer + 1) % int(pattern) != 0


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


# ── a Hugging Face folder ────────────────────────────────────────────────────────────────────────


def _from_folder(name: str, folder: Path) -> Shape:
    config = json.loads((folder / "config.json").read_text())
    weights, parameters = _count(folder)
    return from_config(name, config, weights, parameters)


def from_config(name: str, whole: Mapping[str, Any], weights: int = 0, parameters: int = 0) -> Shape:
    """From a config.json; without counted weights they are estimated from the shapes, in 2 bytes a number."""
    config: Mapping[str, Any] = {**whole, **whole.get("text_config", {})}

    def get(*keys: str, otherwise: Any = None) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), otherwise)

    count = get("num_hidden_layers", "n_layer", "num_layers")
    heads, hidden = get("num_attention_heads", "n_head"), get("hidden_size", "n_embd", "d_model")
    if not count or not heads or not hidden:
        raise ModelError(f"{name}: its config.json has no num_hidden_layers, num_attention_heads or hidden_size")
    kv_heads = 1 if get("multi_query") and not get("new_decoder_architecture") else None
    kv_heads = kv_heads or get("num_key_value_heads", "num_kv_heads", "n_head_kv", otherwise=heads)
    head_dim = get("head_dim", otherwise=hidden // heads)
    latent = get("kv_lora_rank")
    if latent:
        layers = [_latent(latent, get("qk_rope_head_dim", otherwise=64))] * count
    else:
        layers = _hf_layers(config, count, 2 * kv_heads * head_dim)
    vocab = get("vocab_size", otherwise=0)
    if not parameters:
        inner = get("intermediate_size", "n_inner", otherwise=4 * hidden)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        embeddings = vocab * hidden * (1 if get("tie_word_embeddings") else 2)
        parameters = embeddings + count * (attention + 3 * hidden * inner)
    return Shape(
        name=name,
        sharing="MLA" if latent else sharing(heads, kv_heads),
        layers=tuple(layers),
        weights=weights or 2 * parameters,
        counted=bool(weights),
        parameters=parameters,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        vocab=vocab,
        context=get("max_position_embeddings", "n_positions", otherwise=0),
        tied=bool(get("tie_word_embeddings")),
    )


def _hf_layers(config: Mapping[str, Any], count: int, values: int) -> list[Layer]:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types")
    if kinds:
        return [
            Layer("state", 0)
            if kind in ("linear_attention", "mamba", "conv", "recurrent")
            else _kept(values, window if kind == "sliding_attention" else None)
            for kind in kinds
        ]
    pattern = config.get("sliding_window_pattern") or PATTERNS.get(str(config.get("model_type")), 0)
    first_local = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
    return [_kept(values, window if i >= first_local and _is_local(pattern, i) else None) for i in range(count)]


def _kept(values: int, window: int | None) -> Layer:
    return Layer("window", values, int(window)) if window else Layer("full", values)


def _latent(rank: int, rotary: int) -> Layer:
    return Layer("latent", rank + rotary, rotary=rotary)


def sharing(heads: int, kv_heads: int) -> str:
    """How many query heads share a KV head, as it is called."""
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def _count(folder: Path) -> tuple[int, int]:
    """Bytes and numbers of all safetensors files: their headers say both (8 bytes of length, then JSON)."""
    weights = parameters = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                weights += end - start
                parameters += _size(tuple(tensor["shape"]))
    return weights, parameters
