"""A model's weights as they are stored, under our names, from a GGUF file or a Hugging Face folder.

A matrix is a list of parts to be stacked (q, k and v; gate and up). Nothing is dequantised here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile
from octavo.core.models.locate import ModelFiles
from octavo.executors.loading.fingerprint import fingerprint
from octavo.executors.loading.gguf_spec import INTERLEAVED, architecture_of, dequantise, spec_of
from octavo.executors.loading.spec import Spec
from octavo.executors.native.library import Floats, Int32s
from octavo.executors.native.matrix import Rows

LAYER_PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`matrices` by the names of `executors.loading.spec` without `.weight` (embed, head, i.qkv, i.o, i.gate_up,
    i.down); `vectors` are norms (norm, i.attn_norm, i.mlp_norm) and biases (i.qkv.bias and so on), fp32."""

    spec: Spec
    matrices: dict[str, list[Rows]]
    vectors: dict[str, Floats]
    digest: bytes

    def __post_init__(self) -> None:
        for name, rows, cols in _expected(self.spec, own_head="head" in self.matrices):
            found = self.matrices.get(name)
            if found is None:
                raise ModelError(f"the model has no weight {name}")
            shape = sum(len(part.order) for part in found), found[0].cols
            if shape != (rows, cols):
                raise ModelError(f"weight {name} has shape {shape}, {(rows, cols)} was expected")
            if (bias := self.vectors.get(f"{name}.bias")) is not None and bias.shape != (rows,):
                raise ModelError(f"bias {name}.bias has shape {bias.shape}, {(rows,)} was expected")
        for name in ("norm", *(f"{i}.{n}" for i in range(self.spec.layers) for n in ("attn_norm", "mlp_norm"))):
            if (vector := self.vectors.get(name)) is None or vector.shape != (self.spec.hidden,):
                raise ModelError(f"the model has no weight {name} of {self.spec.hidden} numbers")


def _expected(spec: Spec, *, own_head: bool) -> Iterator[tuple[str, int, int]]:
    yield "embed", spec.vocab_size, spec.hidden
    if own_head:
        yield "head", spec.vocab_size, spec.hidden
    for i in range(spec.layers):
        yield f"{i}.qkv", (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.hidden
        yield f"{i}.o", spec.hidden, spec.heads * spec.head_dim
        yield f"{i}.gate_up", 2 * spec.inner, spec.hidden
        yield f"{i}.down", spec.hidden, spec.inner


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Raises `ModelError` when there is no model of this family, or not all of it."""
    if files.path is None:
        raise ModelError(f'the model {files.model_id!r} has no weights; run it with executor.kind = "ghost"')
    return from_gguf(Path(files.path)) if files.kind == "gguf" else from_folder(Path(files.path))


def from_folder(folder: Path) -> Checkpoint:
    """Floats keep their values; `matrix.storage` finds that most need only 16 bits."""
    from octavo.executors.loading.folder import load_folder  # torch reads it, which a GGUF file does without

    model = load_folder(folder)
    matrices: dict[str, list[Rows]] = {}
    vectors: dict[str, Floats] = {}
    for name, tensor in model.weights.items():
        if tensor.ndim == 2:
            values = tensor.numpy()
            # gate and up are packed apart, see `program`
            parts = np.split(values, 2) if name.endswith("gate_up.weight") else [values]
            matrices[name.removesuffix(".weight")] = [Rows.of_floats(part) for part in parts]
        else:
            vectors[name] = tensor.numpy()
    return Checkpoint(model.spec, matrices, vectors, model.digest)


def from_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    architecture = architecture_of(file)
    factors = dequantise(file, "rope_freqs.weight") if "rope_freqs.weight" in file.tensors else None
    spec = spec_of(file, architecture, factors)
    used = {"rope_freqs.weight"}

    def rows(name: str, heads: int = 0) -> Rows | None:
        """`heads`: put each head's interleaved rows into two halves."""
        if (tensor := file.tensors.get(name)) is None:
            return None
        used.add(name)
        order = np.arange(tensor.shape[0], dtype=np.int32)
        if heads:
            order = _split_halves(order, heads)
        return Rows(file.data(name), tensor.kind, order, tensor.shape[1])

    def vector(name: str, heads: int = 0) -> Floats | None:
        if (tensor := file.tensors.get(name)) is None:
            return None
        used.add(name)
        values: Floats = Rows(file.data(name), tensor.kind, np.zeros(1, np.int32), tensor.shape[0]).floats()[0]
        return values[_split_halves(np.arange(len(values), dtype=np.int32), heads)] if heads else values

    matrices: dict[str, list[Rows]] = {}
    vectors: dict[str, Floats] = {}
    for name, theirs in (("embed", "token_embd.weight"), ("head", "output.weight")):
        if (part := rows(theirs)) is not None:
            matrices[name] = [part]
    turned = {"attn_q": spec.heads, "attn_k": spec.kv_heads} if INTERLEAVED[architecture] else {}
    norms = {"norm": "output_norm"}
    for i in range(spec.layers):
        norms |= {f"{i}.attn_norm": f"blk.{i}.attn_norm", f"{i}.mlp_norm": f"blk.{i}.ffn_norm"}
        for ours, names in LAYER_PARTS.items():
            found = [rows(f"blk.{i}.{name}.weight", turned.get(name, 0)) for name in names]
            matrices[f"{i}.{ours}"] = [part for part in found if part is not None]
            if len(matrices[f"{i}.{ours}"]) < len(names):
                raise ModelError(f"{path}: block {i} lacks a weight of {', '.join(names)}")
            biases = [vector(f"blk.{i}.{name}.bias", turned.get(name, 0)) for name in names]
            there = [bias for bias in biases if bias is not None]
            if len(there) not in (0, len(names)):
                raise ModelError(f"{path}: block {i} has a bias for some of {', '.join(names)} but not for all")
            if there:
                vectors[f"{i}.{ours}.bias"] = np.concatenate(there)
    for ours, theirs in norms.items():
        if (values := vector(f"{theirs}.weight")) is not None:
            vectors[ours] = values
    if unused := sorted(file.tensors.keys() - used):
        raise ModelError(f"{path} has {len(unused)} tensors that a plain {architecture} model does not, as {unused[0]}")
    return Checkpoint(spec, matrices, vectors, fingerprint([path]))


def _split_halves(order: Int32s, heads: int) -> Int32s:
    """Within each head, even rows become its first half and odd rows its second."""
    return order.reshape(heads, len(order) // heads // 2, 2).transpose(0, 2, 1).reshape(-1)
