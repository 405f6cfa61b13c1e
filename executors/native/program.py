"""A decoder as a program of fused operations, and the model that runs it.

    embed → ( norm·qkv → attend → o·add → norm·gate_up·gated → down·add ) per layer → norm·head

is Llama; what a `Spec` says beyond that changes an operation's fields or adds one. Row buffers: x, qkv, mixed heads,
inner; what a sublayer gives where it is normed before it is added; the experts' logits, and what they compute; with
latents the queries of low rank, the queries, the new latents and keys, and what heads mix of latents; a product that
waits for what adapters add before it is activated. Their widths are whole vectors of 16; what is beyond a row's real
width is zero and stays so.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.core.models.errors import ModelError
from octavo.executors.loading.spec import Experts, Latent, Spec
from octavo.executors.native.library import (
    Act,
    CAdapter,
    CAngles,
    CMatrix,
    COp,
    CShape,
    CStep,
    Floats,
    Int32s,
    Isa,
    Kind,
    Mode,
    OpKind,
    int32s,
)
from octavo.executors.native.weights import Weights, up

X, QKV, MIXED, INNER, SIDE, ROUTER, SLOT_INNER, SLOT, LOW, QUERIES, KEYS, LATENTS, WIDE = range(13)
SITES = ("qkv", "o", "up", "down")
"""Products of a layer that adapters may add to, in the order of their numbers."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool that a model is made with; `kind` is F32, BF16 or I8."""

    blocks: int
    block_size: int
    kind: Kind


def widths(spec: Spec) -> list[int]:
    """Of the row buffers, in whole vectors."""
    qkv, mixed = (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.heads * spec.head_dim
    low = queries = keys = latents = 0
    if latent := spec.latent:
        qkv = latents = spec.heads * latent.rank
        mixed = spec.heads * latent.values
        low, queries, keys = latent.query_rank, spec.heads * (latent.kept + latent.rotated), spec.head_dim
    side = spec.hidden if spec.post_norms else 0
    experts = spec.experts
    inner = max(spec.inner, experts.shared if experts else 0)
    of_experts = (experts.count, experts.inner, spec.hidden) if experts else (0, 0, 0)
    wide = up(inner) * (2 if spec.gated else 1)
    return [up(n) for n in (spec.hidden, qkv, mixed, inner, side, *of_experts, low, queries, keys, latents, wide)]


def kv_bytes(spec: Spec, kind: Kind) -> int:
    """Bytes of KV a token takes. Raises `ModelError` for a kind that this model's KV cannot be kept in."""
    d = spec.head_dim
    if spec.latent:
        if kind is Kind.I8:
            raise ModelError('latent attention has no 8-bit KV; set executor.kv = "bf16", or leave it out')
        return spec.layers * up(d) * (2 if kind is Kind.BF16 else 4)
    if kind is Kind.I8:  # and a scale for each 32 numbers
        head = -(-d // 4) * 4 + up(d) + 2 * 4 * -(-d // 32)
    else:
        head = (d + up(d)) * (2 if kind is Kind.BF16 else 4)
    return spec.layers * spec.kv_heads * head


class Inputs(NamedTuple):
    """A step's tokens, flat: see `OctStep`. `logit_rows` is -1 for a sample that wants its best token only; without
    `prompt_ends` all tokens are computed as generated ones are."""

    ids: Int32s
    positions: Int32s
    sequences: Int32s
    tables: Int32s
    table_start: Int32s
    sample_rows: Int32s
    logit_rows: Int32s
    copy_source: Int32s
    copy_target: Int32s
    paths: Int32s | None = None
    path_start: Int32s | None = None
    prompt_ends: Int32s | None = None


class Outputs(NamedTuple):
    """By sample: best token, and whether its logits are finite; logits by row; by token, whether it is finite, and its
    last hidden state [tokens, hidden], after the final norm, if it was asked for; inputs of layers [tokens, layers ·
    hidden], if any were."""

    best: Int32s
    sample_finite: list[bool]
    logits: Floats
    finite: list[bool]
    hidden: Floats | None = None
    inner: Floats | None = None


class PackedAdapter(Protocol):
    """A LoRA adapter as the library wants it."""

    @property
    def c(self) -> CAdapter: ...


class StepError(RuntimeError):
    """A step that cannot be run as it was laid out: a bug of ours."""


class Native:
    """A model with its KV pool and threads."""

    def __init__(self, weights: Weights, pool: Pool, threads: int, isa: Isa | None = None) -> None:
        spec, library = weights.spec, weights.library
        self.weights = weights
        self.pool = pool
        self.threads = threads
        self.isa = Isa(library.oct_isa_best()) if isa is None else isa
        self._library = library
        self._shape = CShape(
            spec.layers, spec.kv_heads, spec.head_dim, pool.blocks, pool.block_size, pool.kind, weights.context,
            weights.exact, threads, self.isa, spec.latent.rank if spec.latent else 0,
        )  # fmt: skip
        ops, self._begins = program(weights)
        self._ops = (COp * len(ops))(*ops)
        self._widths = int32s(widths(spec))
        tables = weights.angles
        self._angles = (CAngles * len(tables))(*(CAngles(table.shape[2], table.ctypes.data) for table in tables))
        self._model: int | None = library.oct_model_new(
            self._shape, ctypes.addressof(self._ops), len(ops), self._widths.ctypes.data, len(self._widths),
            ctypes.addressof(self._angles), len(tables),
        )  # fmt: skip
        if self._model is None:
            raise ModelError(
                f"no memory for a pool of {pool.blocks} blocks (lower kv.tokens), or over 2000 operations: {len(ops)}"
            )

    def __del__(self) -> None:
        if getattr(self, "_model", None) is not None:
            self._library.oct_model_free(self._model)
            self._model = None

    @property
    def own_prompts(self) -> bool:
        """Whether rows of prompts can have products of their own, faster and with other bits."""
        kinds = {matrix.kind for matrix in self.weights.matrices.values()}
        return not self.weights.exact and any(self._library.oct_prompts(self.isa, kind) for kind in kinds)

    def ready(self, tokens: int) -> None:
        """Take from the system now what a step of up to `tokens` writes, and the first blocks of the pool, for which
        the first step would wait. Raises `ModelError` where there is no memory for that."""
        if code := self._library.oct_ready(self._model, tokens):
            why = self._library.oct_error(code).decode()
            raise ModelError(f"steps of {tokens} tokens: {why}; lower scheduler.chunk_budget")

    def copy_blocks(self, source: Int32s, target: Int32s) -> None:
        """As if all were read before any is written."""
        none = int32s([])
        self.step(Inputs(none, none, none, none, int32s([0]), none, none, source, target))

    def copy_cells(self, source: Int32s, target: Int32s) -> None:
        """Of single tokens, numbered block · block_size + slot, as if all were read before any is written."""
        if self._library.oct_copy_cells(self._model, len(source), source.ctypes.data, target.ctypes.data):
            raise StepError(f"cells {source.tolist()} to {target.tolist()} are not all in the pool")

    def step(
        self,
        inputs: Inputs,
        *,
        layers: int | None = None,
        hidden: bool = False,
        taps: Sequence[int] = (),
        adapters: Int32s | None = None,
        loaded: Sequence[PackedAdapter] = (),
    ) -> Outputs:
        """With `layers`, the first so many stand for all; with `hidden`, hidden states are given too, and of the layers
        that are `taps` the inputs. `adapters` say, by token, which of `loaded` it has, -1 for none."""
        tokens, samples = len(inputs.ids), len(inputs.sample_rows)
        rows = max(inputs.logit_rows.tolist(), default=-1) + 1
        best, sample_finite = np.zeros(samples, np.int32), np.zeros(samples, np.bool_)
        logits, finite = np.empty((rows, self.weights.spec.vocab_size), np.float32), np.zeros(tokens, np.bool_)
        step = CStep(tokens, samples, len(inputs.copy_source), len(inputs.table_start) - 1)
        for name, array in inputs._asdict().items():
            if array is not None:
                setattr(step, name, array.ctypes.data)
        step.best, step.sample_finite = best.ctypes.data, sample_finite.ctypes.data
        step.logits, step.finite = logits.ctypes.data, finite.ctypes.data
        if layers is not None:
            step.skip_from, step.skip_to = self._begins[layers], self._begins[-1]
        held = (CAdapter * len(loaded))(*(one.c for one in loaded))
        if adapters is not None and loaded:
            step.loaded_count, step.adapters, step.loaded = len(loaded), adapters.ctypes.data, ctypes.addressof(held)
        states = np.empty((tokens, self.weights.spec.hidden), np.float32) if hidden else None
        if states is not None:
            step.hidden = states.ctypes.data
        if asked := sorted(set(taps)):
            tap_ops = int32s([self._begins[layer] for layer in asked])
            tapped = np.empty((len(asked), tokens, self.weights.spec.hidden), np.float32)
            step.taps, step.tap_ops, step.tapped = len(asked), tap_ops.ctypes.data, tapped.ctypes.data
        if code := self._library.oct_step(self._model, step):
            raise StepError(f"the step library refuses a step: {self._library.oct_error(code).decode()}")
        inner = np.concatenate([tapped[asked.index(layer)] for layer in taps], axis=1) if asked else None
        return Outputs(best, sample_finite.tolist(), logits, finite.tolist(), states, inner)

    def rows(self, function: str, table: npt.NDArray[np.void]) -> None:
        """One of the library's functions on rows of logits, on this model's threads."""
        call = getattr(self._library, function)
        call(self._model, self.isa, self.weights.spec.vocab_size, table.ctypes.data, len(table))

    def watch(self) -> npt.NDArray[np.float64]:
        """Seconds by operation, to prepare rows and to compute: [operations, 2]. Steps add to them from now on."""
        self._times = np.zeros((len(self._ops), 2))
        self._library.oct_times(self._model, self._times.ctypes.data)
        return self._times

    @property
    def operations(self) -> list[OpKind]:
        return [OpKind(op.kind) for op in self._ops]


def program(weights: Weights) -> tuple[list[COp], list[int]]:
    """The operations of a model; the first one of each layer, and of what comes after all layers."""
    made = _Program(weights)
    return made.ops, made.begins


class _Program:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._spec = spec = weights.spec
        self.ops: list[COp] = []
        self.begins: list[int] = []
        self._rows: list[ctypes.Array[CMatrix]] = weights.rows
        embed = self._op(OpKind.EMBED, X, X)
        embed.scale, embed.matrix = spec.embed_scale, self._matrix("embed")
        if spec.learned_positions:
            positions = self._op(OpKind.EMBED, X, X)
            positions.mode, positions.matrix = Mode.ADD, self._matrix("positions")
        if spec.embed_norm:
            self._normed(X, "embed_norm")
        for i in range(spec.layers):
            self.begins.append(len(self.ops))
            self._layer(i)
        self.begins.append(len(self.ops))
        head = self._linear(X, X, weights.head, "norm", OpKind.HEAD)
        head.cap = spec.logit_cap

    def _layer(self, i: int) -> None:
        spec = self._spec
        if spec.latent:
            self._latent(i, spec.latent)
        else:
            self._stacked(X, QKV, f"{i}.qkv", f"{i}.attn_norm")
            self._adapt(i, "qkv", X, QKV, f"{i}.attn_norm", cols=spec.hidden)
            if spec.qkv_cap:
                bound = self._op(OpKind.BOUND, QKV, QKV)
                bound.width, bound.cap = (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.qkv_cap
            attend = self._attend(i, MIXED)
            if spec.head_norms:
                attend.q_norm, attend.k_norm = self._vector(f"{i}.q_norm"), self._vector(f"{i}.k_norm")
        if spec.parallel:
            self._rise(i)
            self._linear(MIXED, X, f"{i}.o", mode=Mode.ADD)
            self._adapt(i, "o", MIXED, X, cols=spec.heads * spec.head_dim)
            self._linear(INNER, X, f"{i}.down", mode=Mode.ADD)
            self._adapt(i, "down", INNER, X, cols=spec.inner)
            return
        self._give(i, "o", MIXED, f"{i}.post_attn_norm", cols=spec.heads * spec.head_dim)
        if spec.experts is not None and spec.is_mixture(i):
            self._mixture(i, spec.experts)
            return
        self._rise(i)
        self._give(i, "down", INNER, f"{i}.post_mlp_norm", cols=spec.inner)

    def _attend(self, i: int, target: int) -> COp:
        spec, attend = self._spec, self._op(OpKind.ATTEND, QKV, target)
        attend.layer, attend.angles, attend.window = i, spec.rotation(i), spec.window(i)
        attend.scale, attend.cap = spec.score_scale or spec.head_dim**-0.5, spec.score_cap
        attend.slopes = self._vector("slopes")
        return attend

    def _latent(self, i: int, latent: Latent) -> None:
        """Queries into the space of latents, attention there, and what is mixed out of it, head by head."""
        if latent.query_rank:
            self._linear(X, LOW, f"{i}.q_a", f"{i}.attn_norm")
            self._linear(LOW, QUERIES, f"{i}.q_b", f"{i}.q_a_norm")
        else:
            self._linear(X, QUERIES, f"{i}.q", f"{i}.attn_norm")
        self._linear(X, KEYS, f"{i}.kv_a", f"{i}.attn_norm")
        width = latent.kept + latent.rotated
        heads = range(self._spec.heads)
        self._side_by_side(OpKind.HEADS, QUERIES, QKV, [f"{i}.{h}.uk" for h in heads]).width = width
        attend = self._attend(i, LATENTS)
        attend.queries, attend.keys, attend.width = QUERIES, KEYS, width
        attend.k_norm = self._vector(f"{i}.kv_norm")
        self._side_by_side(OpKind.HEADS, LATENTS, MIXED, [f"{i}.{h}.uv" for h in heads]).width = latent.rank

    def _side_by_side(self, kind: OpKind, source: int, target: int, names: list[str]) -> COp:
        """An operation of several matrices."""
        row = [self._weights.matrices[name] for name in names]
        if len({(matrix.kind, matrix.block_bytes) for matrix in row}) > 1:
            raise ModelError(f"{names[0]} to {names[-1]} are not packed alike")
        self._rows.append((CMatrix * len(row))(*row))
        op = self._op(kind, source, target)
        op.matrix = ctypes.cast(self._rows[-1], ctypes.POINTER(CMatrix))
        return op

    def _rise(self, i: int) -> None:
        name, mode = (f"{i}.gate_up", Mode.GATED) if self._spec.gated else (f"{i}.up", Mode.ACT)
        rise = self._linear(X, INNER, name, f"{i}.mlp_norm", mode=mode)
        if adapt := self._adapt(i, "up", X, INNER, f"{i}.mlp_norm", cols=self._spec.hidden):
            adapt.mode, adapt.wide = mode, WIDE
            rise.wide = WIDE

    def _mixture(self, i: int, experts: Experts) -> None:
        self._linear(X, ROUTER, f"{i}.router", f"{i}.mlp_norm")
        route = self._op(OpKind.ROUTE, ROUTER, ROUTER)
        route.experts, route.used, route.scale = experts.count, experts.used, experts.scale
        route.groups, route.groups_used = experts.groups, experts.groups_used
        route.sigmoid, route.bias = experts.sigmoid, self._vector(f"{i}.correction")
        route.mode = Mode.ADD if experts.normed else Mode.STORE
        each = range(experts.count)
        rise = self._side_by_side(OpKind.RISE, X, SLOT_INNER, [f"{i}.{e}.gate_up" for e in each])
        rise.mode, rise.norm = Mode.GATED, self._vector(f"{i}.mlp_norm")
        self._side_by_side(OpKind.FALL, SLOT_INNER, SLOT, [f"{i}.{e}.down" for e in each])
        if experts.shared:
            self._linear(X, INNER, f"{i}.shared.gate_up", f"{i}.mlp_norm", mode=Mode.GATED)
        self._op(OpKind.BLEND, SLOT, X)
        if experts.shared:
            self._linear(INNER, X, f"{i}.shared.down", mode=Mode.ADD)

    def _give(self, i: int, site: str, source: int, norm: str, *, cols: int) -> None:
        """A sublayer's last product, added to x."""
        if not self._spec.post_norms:
            self._linear(source, X, f"{i}.{site}", mode=Mode.ADD)
            self._adapt(i, site, source, X, cols=cols)
            return
        self._linear(source, SIDE, f"{i}.{site}")
        self._adapt(i, site, source, SIDE, cols=cols)
        self._normed(SIDE, norm).mode = Mode.ADD

    def _normed(self, source: int, norm: str) -> COp:
        normed = self._op(OpKind.NORMED, source, X)
        normed.width, normed.norm, normed.norm_bias = (
            self._spec.hidden,
            self._vector(norm),
            self._vector(f"{norm}.bias"),
        )
        return normed

    def _adapt(self, i: int, site: str, source: int, target: int, norm: str = "", *, cols: int) -> COp | None:
        """What adapters add to the product before, of `cols` columns. Models with latents have none."""
        if self._spec.latent:
            return None
        op = self._op(OpKind.ADAPT, source, target)
        op.site, op.width = len(SITES) * i + SITES.index(site), cols
        if norm:
            op.norm, op.norm_bias = self._vector(norm), self._vector(f"{norm}.bias")
        return op

    def _stacked(self, source: int, target: int, name: str, norm: str) -> None:
        """A product whose parts may be packed apart."""
        if name in self._weights.matrices:
            self._linear(source, target, name, norm)
            return
        column = 0
        for part in itertools.takewhile(
            self._weights.matrices.__contains__, (f"{name}.{k}" for k in itertools.count())
        ):
            op = self._linear(source, target, part, norm)
            op.column = column
            if bias := self._vector(f"{name}.bias"):
                op.bias = bias + 4 * column
            column += self._weights.matrices[part].rows

    def _linear(
        self,
        source: int,
        target: int,
        name: str,
        norm: str = "",
        kind: OpKind = OpKind.LINEAR,
        mode: Mode = Mode.STORE,
    ) -> COp:
        op = self._op(kind, source, target)
        op.mode, op.matrix, op.bias = mode, self._matrix(name), self._vector(f"{name}.bias")
        if (columns := self._weights.columns.get(name)) is not None:
            op.order = columns.ctypes.data
        if norm:
            op.norm, op.norm_bias = self._vector(norm), self._vector(f"{norm}.bias")
        return op

    def _op(self, kind: OpKind, source: int, target: int) -> COp:
        spec = self._spec
        op = COp(kind=kind, source=source, target=target, heads=spec.heads, act=Act[spec.activation.upper()])
        op.eps, op.scale, op.norm_kind = spec.norm_eps, 1.0, spec.layer_norm
        self.ops.append(op)
        return op

    def _matrix(self, name: str) -> ctypes._Pointer[CMatrix]:
        return ctypes.pointer(self._weights.matrices[name])

    def _vector(self, name: str) -> int | None:
        vector = self._weights.vectors.get(name)
        return None if vector is None else vector.ctypes.data
