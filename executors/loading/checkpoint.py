"""A model's weights as they are stored, under our names, whatever file they come from. No torch.

A matrix is a list of parts to be stacked (q, k and v; gate and up). Nothing is dequantised here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.executors.loading.rows import Floats, Int32s, Rows
from octavo.executors.loading.spec import Latent, Spec


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`matrices`: embed, head (absent when tied), positions, and per layer i: i.qkv, i.o, i.down and i.gate_up (two
    parts) or i.up; with experts i.router, and i.e.gate_up and i.e.down of each expert e, i.shared.gate_up and
    i.shared.down. With latents, in place of i.qkv: i.q or i.q_a and i.q_b, i.kv_a, and i.h.uk and i.h.uv of each head.
    `vectors` are fp32: norm, embed_norm where embeddings are normed, and, per layer, attn_norm, mlp_norm, q_norm,
    k_norm, post_attn_norm, post_mlp_norm, q_a_norm, kv_norm; with sigmoids i.correction; with `.bias` behind the name
    those of norms and matrices. `notes` tell of what was left aside."""

    spec: Spec
    matrices: dict[str, list[Rows]]
    vectors: dict[str, Floats]
    digest: bytes
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, rows, cols in _matrices(self.spec, own_head="head" in self.matrices):
            found = self.matrices.get(name)
            if found is None:
                raise ModelError(f"the model has no weight {name}")
            shape = sum(len(part.order) for part in found), found[0].cols
            if shape != (rows, cols) or any(part.cols != cols for part in found):
                raise ModelError(f"weight {name} has shape {shape}, {(rows, cols)} was expected{_hint(name, shape)}")
            if name.endswith("gate_up") and len(sizes := {len(part.order) for part in found}) > 1:
                raise ModelError(f"the parts of weight {name} have {sorted(sizes)} rows; they must have as many")
            if (bias := self.vectors.get(f"{name}.bias")) is not None and bias.shape != (rows,):
                raise ModelError(f"bias {name}.bias has shape {bias.shape}, {(rows,)} was expected")
        for name, length in _norms(self.spec):
            if (vector := self.vectors.get(name)) is None:
                raise ModelError(f"the model has no weight {name} of {length} numbers")
            for each in (vector, self.vectors.get(f"{name}.bias", vector)):
                if each.shape != (length,):
                    raise ModelError(f"weight {name} has shape {each.shape}, {(length,)} was expected")
        self._check_biases()
        for name, vector in self.vectors.items():
            if not np.isfinite(vector).all():
                raise ModelError(f"weight {name} has numbers that are not finite; the file is damaged: fetch it again")

    def _check_biases(self) -> None:
        """What has a bias in one layer has it in all; so have layer norms."""
        kinds: dict[str, tuple[list[str], list[str]]] = {}
        for name in (*self.matrices, *self.vectors):
            if not name.endswith(".bias"):
                kind = "norms" if name.endswith("norm") and self.spec.layer_norm else name.lstrip("0123456789.")
                kinds.setdefault(kind, ([], []))[f"{name}.bias" in self.vectors].append(name)
        for without, those in kinds.values():
            if without and those:
                raise ModelError(f"the model has a bias for {those[0]} but not for {without[0]}")


def _hint(name: str, shape: tuple[int, int]) -> str:
    return f": the vocabulary of the weights has {shape[0]} tokens" if name in ("embed", "head") else ""


def _matrices(spec: Spec, *, own_head: bool) -> Iterator[tuple[str, int, int]]:
    yield "embed", spec.vocab_size, spec.hidden
    if own_head:
        yield "head", spec.vocab_size, spec.hidden
    if spec.learned_positions:
        yield "positions", spec.context, spec.hidden
    for i in range(spec.layers):
        if spec.latent is None:
            yield f"{i}.qkv", (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.hidden
            yield f"{i}.o", spec.hidden, spec.heads * spec.head_dim
        else:
            yield from _of_latents(i, spec, spec.latent)
        if spec.experts is None or not spec.is_mixture(i):
            up = (f"{i}.gate_up", 2 * spec.inner) if spec.gated else (f"{i}.up", spec.inner)
            yield *up, spec.hidden
            yield f"{i}.down", spec.hidden, spec.inner
        else:
            yield f"{i}.router", spec.experts.count, spec.hidden
            for e in range(spec.experts.count):
                yield f"{i}.{e}.gate_up", 2 * spec.experts.inner, spec.hidden
                yield f"{i}.{e}.down", spec.hidden, spec.experts.inner
            if shared := spec.experts.shared:
                yield f"{i}.shared.gate_up", 2 * shared, spec.hidden
                yield f"{i}.shared.down", spec.hidden, shared


def _of_latents(i: int, spec: Spec, latent: Latent) -> Iterator[tuple[str, int, int]]:
    queries = spec.heads * (latent.kept + latent.rotated)
    if latent.query_rank:
        yield f"{i}.q_a", latent.query_rank, spec.hidden
        yield f"{i}.q_b", queries, latent.query_rank
    else:
        yield f"{i}.q", queries, spec.hidden
    yield f"{i}.kv_a", latent.rank + latent.rotated, spec.hidden
    for h in range(spec.heads):
        yield f"{i}.{h}.uk", latent.rank, latent.kept
        yield f"{i}.{h}.uv", latent.values, latent.rank
    yield f"{i}.o", spec.hidden, spec.heads * latent.values


def _norms(spec: Spec) -> Iterator[tuple[str, int]]:
    yield "norm", spec.hidden
    if spec.embed_norm:
        yield "embed_norm", spec.hidden
    for i in range(spec.layers):
        for name in ("attn_norm", "mlp_norm", *(("post_attn_norm", "post_mlp_norm") if spec.post_norms else ())):
            yield f"{i}.{name}", spec.hidden
        if spec.head_norms:
            yield from ((f"{i}.q_norm", spec.head_dim), (f"{i}.k_norm", spec.head_dim))
        if spec.latent:
            yield f"{i}.kv_norm", spec.latent.rank
            if spec.latent.query_rank:
                yield f"{i}.q_a_norm", spec.latent.query_rank
        if spec.experts and spec.experts.sigmoid and spec.is_mixture(i):
            yield f"{i}.correction", spec.experts.count


class Source(Protocol):
    """Tensors by the names that their file gives them; None for one that is not there."""

    def rows(self, name: str) -> Rows | None: ...

    def vector(self, name: str) -> Floats | None: ...


@dataclass(frozen=True, slots=True)
class Names:
    """What a file calls things. `layer` has `{i}` in it and goes before the names of `parts` and `norms`.

    `parts` are, by matrix of ours, ways in which it may be stored: one tensor or several to be stacked. `order` says,
    for a tensor, in which order its rows are wanted, given 0, 1, 2 …"""

    embed: str
    norm: str
    head: str
    layer: str
    parts: Mapping[str, tuple[tuple[str, ...], ...]]
    norms: Mapping[str, str]
    positions: str = ""
    order: Mapping[str, Callable[[Int32s], Int32s]] | None = None
    norm_offset: float = 0.0
    """Norm weights are stored so much too small."""
    either: Mapping[str, str] | None = None
    """Other names of norms, by ours, for folders that have these."""
    embed_norm: str = ""
    correction: str = ""
    """What is added to each expert's score where experts are chosen."""


def gather(spec: Spec, names: Names, source: Source) -> tuple[dict[str, list[Rows]], dict[str, Floats]]:
    """`Checkpoint.matrices` and `Checkpoint.vectors`; what is missing is for the checkpoint to miss."""
    matrices: dict[str, list[Rows]] = {}
    vectors: dict[str, Floats] = {}

    def matrix(ours: str, ways: tuple[tuple[str, ...], ...]) -> None:
        for way in ways:
            parts = [source.rows(f"{name}.weight") for name in way]
            there = [part for part in parts if part is not None]
            if not there:
                continue
            if len(there) < len(way):
                raise ModelError(f"the model has some of {', '.join(way)} but not all")
            orders = [_ordered(names, name, part.order) for name, part in zip(way, there, strict=True)]
            biases = [source.vector(f"{name}.bias") for name in way]
            given = [bias[order] for bias, order in zip(biases, orders, strict=True) if bias is not None]
            if len(given) not in (0, len(way)):
                raise ModelError(f"the model has a bias for some of {', '.join(way)} but not for all")
            there = [part._replace(order=order) for part, order in zip(there, orders, strict=True)]
            if ours.endswith("gate_up") and len(there) == 1:
                half = len(there[0].order) // 2
                there = [there[0].slice(0, half), there[0].slice(half, 2 * half)]
            matrices[ours] = there
            if given:
                vectors[f"{ours}.bias"] = np.concatenate(given)
            return

    def norm(ours: str, theirs: str) -> None:
        if (values := source.vector(f"{theirs}.weight")) is not None:
            vectors[ours] = values + np.float32(names.norm_offset)
        if (values := source.vector(f"{theirs}.bias")) is not None:
            vectors[f"{ours}.bias"] = values

    for ours, theirs in (("embed", names.embed), ("head", names.head), ("positions", names.positions)):
        if theirs:
            matrix(ours, ((theirs,),))
    tied = "embed" in matrices and "head" not in matrices
    if tied and names.head and (bias := source.vector(f"{names.head}.bias")) is not None:
        matrices["head"], vectors["head.bias"] = matrices["embed"], bias  # tied, but for what it adds
    norm("norm", names.norm)
    if names.embed_norm:
        norm("embed_norm", names.embed_norm)
    for i in range(spec.layers):
        layer = names.layer.format(i=i)
        for ours, ways in names.parts.items():
            for e in range(spec.experts.count if spec.experts and "{e}" in ours else 1):
                stored = tuple(tuple(layer + name.format(e=e) for name in way) for way in ways)
                matrix(f"{i}.{ours.format(e=e)}", stored)
        for ours, theirs in names.norms.items():
            norm(f"{i}.{ours}", layer + theirs)
        for ours, theirs in (names.either or {}).items():
            norm(f"{i}.{ours}", layer + theirs)
        if names.correction and (values := source.vector(layer + names.correction)) is not None:
            vectors[f"{i}.correction"] = values
    return matrices, vectors


def _ordered(names: Names, name: str, order: Int32s) -> Int32s:
    for ending, wanted in (names.order or {}).items():
        if name.endswith(ending):
            try:
                return wanted(order)
            except ValueError:
                raise ModelError(f"weight {name} has {len(order)} rows, which are no whole heads") from None
    return order


def split_halves(order: Int32s, heads: int) -> Int32s:
    """Undo llama.cpp's interleaving: within each head, even rows become its first half and odd rows its second."""
    return order.reshape(heads, len(order) // heads // 2, 2).transpose(0, 2, 1).reshape(-1)


def split_parts(order: Int32s, heads: int) -> Int32s:
    """Rows stored head by head, each with its query, key and value: all queries first, then keys, then values."""
    return order.reshape(heads, 3, -1).transpose(1, 0, 2).reshape(-1)
