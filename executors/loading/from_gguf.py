"""A GGUF file as a checkpoint: its metadata as a `Spec`, its tensors by our names. No torch.

llama.cpp stores the query and key rows of some families with the two halves of each head interleaved (its rotary
embedding turns neighbours); that is undone here by the order of rows.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile, TensorInfo
from octavo.executors.loading.checkpoint import Checkpoint, Names, gather, split_halves
from octavo.executors.loading.fingerprint import fingerprint
from octavo.executors.loading.rope import Rope, yarn_scale
from octavo.executors.loading.rows import Floats, Rows
from octavo.executors.loading.spec import Spec

_INTERLEAVED = ("llama", "smollm3")
_FAMILIES = ("llama", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "gemma3", "gptneox", "gpt2")
_BLOCK = re.compile(r"^blk\.\d+\.")
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_NAMES = Names(
    embed="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{i}.",
    parts={
        "qkv": (("attn_q", "attn_k", "attn_v"), ("attn_qkv",)),
        "o": (("attn_output",),),
        "gate_up": (("ffn_gate", "ffn_up"),),
        "down": (("ffn_down",),),
    },
    norms={
        "attn_norm": "attn_norm",
        "mlp_norm": "ffn_norm",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "post_attn_norm": "post_attention_norm",
        "post_mlp_norm": "post_ffw_norm",
    },
)


def from_gguf(path: Path) -> Checkpoint:
    """Raises `ModelError` when the file holds no model of a known family, or not all of it."""
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _FAMILIES:
        raise ModelError(
            f"{path} is a model of architecture {architecture!r}; those that are known are {', '.join(_FAMILIES)}"
        )
    source = _Source(file)
    spec = _Metadata(file, architecture).spec(
        source.vector("rope_freqs.weight"), source.vector("rope_factors_short.weight")
    )
    matrices, vectors = gather(spec, _names(spec), source)
    if unused := sorted(file.tensors.keys() - source.used - set(_ROPE_FACTORS)):
        if inside := [name for name in unused if _BLOCK.match(name)]:
            raise ModelError(
                f"{path} has {len(inside)} tensors that a {architecture} model of {spec.layers} layers does not, "
                f"as {inside[0]}"
            )
        notes: tuple[str, ...] = (f"{len(unused)} tensors were left aside, as {unused[0]}",)
    else:
        notes = ()
    return Checkpoint(spec, matrices, vectors, fingerprint([path]), notes)


def _names(spec: Spec) -> Names:
    names = _NAMES
    if spec.architecture in _INTERLEAVED:
        turned = {"attn_q": spec.heads, "attn_k": spec.kv_heads}
        order = {f".{name}": partial(split_halves, heads=heads) for name, heads in turned.items()}
        names = replace(names, order=order)
    if spec.architecture == "phi3":
        names = replace(names, parts=dict(names.parts) | {"gate_up": (("ffn_up",),)})
    if not spec.gated:
        parts = {name: ways for name, ways in names.parts.items() if name != "gate_up"}
        names = replace(names, parts=parts | {"up": (("ffn_up",),)})
    return replace(names, positions="position_embd") if spec.learned_positions else names


class _Source:
    """The file's tensors as a `checkpoint.Source`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.used: set[str] = set()

    def _find(self, name: str, dimensions: int) -> TensorInfo | None:
        if (tensor := self._file.tensors.get(name)) is None:
            return None
        if len(tensor.shape) != dimensions:
            raise ModelError(
                f"{self._file.path}: tensor {name} has shape {tensor.shape}, {dimensions} dimensions were expected"
            )
        self.used.add(name)
        return tensor

    def rows(self, name: str) -> Rows | None:
        tensor = self._find(name, 2)
        return tensor and Rows.stored(self._file.data(name), tensor.kind, *tensor.shape)

    def vector(self, name: str) -> Floats | None:
        if (tensor := self._find(name, 1)) is None:
            return None
        values: Floats = Rows.stored(self._file.data(name), tensor.kind, 1, *tensor.shape).floats()[0]
        return values


class _Metadata:
    """The metadata of one architecture, whose keys begin with its name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self._file.path} has no metadata {self._architecture}.{key}")
        return value

    def spec(self, factors: Floats | None, short: Floats | None) -> Spec:
        """`factors` and `short` are frequency factors of the file: of llama3's kind, and of longrope's."""
        path, kind = self._file.path, self._architecture
        heads, hidden = int(self.get("attention.head_count")), int(self.get("embedding_length"))
        head_dim = int(self.get("attention.key_length", hidden // heads))
        if (values := int(self.get("attention.value_length", head_dim))) != head_dim:
            raise ModelError(f"{path} has keys of {head_dim} and values of {values} dimensions; they must be equal")
        if "token_embd.weight" not in self._file.tensors:
            raise ModelError(f"{path} has no tensor token_embd.weight")
        vocabulary = self._file.tensors["token_embd.weight"].shape[0]
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        if tokens is not None and len(tokens) != vocabulary:
            raise ModelError(
                f"{path} has weights for a vocabulary of {vocabulary} tokens, but its tokenizer has {len(tokens)}"
            )
        layers, layer_norm = int(self.get("block_count")), kind in ("gptneox", "gpt2")
        rope, context = self._rope(head_dim, factors, short)
        spec = Spec(
            architecture=kind,
            vocab_size=vocabulary,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=int(self.get("attention.head_count_kv", heads)),
            head_dim=head_dim,
            inner=int(self.get("feed_forward_length")),
            norm_eps=float(self.get(f"attention.layer_norm{'' if layer_norm else '_rms'}_epsilon")),
            context=context,
            rope=rope,
            head_norms=kind in ("qwen3", "gemma3"),
        )
        if kind == "smollm3":
            return replace(spec, rotations=tuple(0 if (i + 1) % 4 else -1 for i in range(layers)))
        if kind == "phi3" and (window := int(self.get("attention.sliding_window", 0))):
            return replace(spec, windows=(window,) * layers)
        if kind.startswith("gemma"):
            return self._gemma(spec)
        if kind == "gptneox":
            parallel = bool(self.get("use_parallel_residual", True))
            return replace(spec, gated=False, activation="gelu", layer_norm=True, parallel=parallel)
        if kind == "gpt2":
            return replace(
                spec,
                gated=False,
                activation="gelu_tanh",
                layer_norm=True,
                learned_positions=True,
                rotations=(-1,) * layers,
            )
        return spec

    def _gemma(self, spec: Spec) -> Spec:
        spec = replace(spec, activation="gelu_tanh", embed_scale=math.sqrt(spec.hidden))
        if spec.architecture == "gemma":
            return spec
        window = int(self.get("attention.sliding_window", 0))
        if spec.architecture == "gemma2":
            # The largest Gemma 2 scales by what its heads would be if they shared the hidden size.
            scaled = spec.hidden // spec.heads if spec.layers == 46 else spec.head_dim
            return replace(
                spec, post_norms=True, windows=tuple(0 if i % 2 else window for i in range(spec.layers)),
                score_scale=scaled**-0.5, score_cap=float(self.get("attn_logit_softcapping", 50.0)),
                logit_cap=float(self.get("final_logit_softcapping", 30.0)),
            )  # fmt: skip
        scaled = spec.hidden // spec.heads if spec.layers == 62 else spec.head_dim
        windows = tuple(window if (i + 1) % 6 else 0 for i in range(spec.layers))
        return replace(
            spec, post_norms=True, windows=windows, rotations=tuple(1 if w else 0 for w in windows),
            local_rope=Rope(10000.0), score_scale=scaled**-0.5,
        )  # fmt: skip

    def _rope(self, head_dim: int, factors: Floats | None, short: Floats | None) -> tuple[Rope, int]:
        longest = int(self.get("context_length"))
        dims = int(self.get("rope.dimension_count", head_dim))
        plain = Rope(float(self.get("rope.freq_base", 10000.0)), dims=0 if dims == head_dim else dims)
        if factors is not None:
            return replace(plain, kind="factors", factors=tuple(factors.tolist())), longest
        kind = str(self.get("rope.scaling.type", "none"))
        original = int(self.get("rope.scaling.original_context_length", longest))
        if short is not None:
            scale = float(self.get("rope.scaling.attn_factor", 1.0))
            return replace(plain, kind="factors", factors=tuple(short.tolist()), scale=scale), original
        if kind == "none":
            return plain, longest
        factor = float(self.get("rope.scaling.factor"))
        if kind == "linear":  # Gemma 3 gives the length that it has scaled already
            scaled = self._architecture == "gemma3"
            return replace(plain, kind=kind, factor=factor), longest if scaled else int(longest * factor)
        if kind == "yarn":
            scale = float(self.get("rope.scaling.attn_factor", 1.0)) * yarn_scale(factor)
            rope = replace(plain, kind=kind, factor=factor, original_context=original, scale=scale)
            return rope, int(original * factor)
        raise ModelError(
            f"{self._file.path} scales its rotary embedding by {kind!r}; "
            "known are none, linear, yarn and factors in the file"
        )
