"""A Llama-family model as a program of fused operations, and the model that runs it.

    embed → ( norm·qkv → attend → o·add → norm·gate_up·gated → down·add ) per layer → norm·head

Four row buffers: x, qkv, mixed heads, inner. Their widths are whole vectors of 16; what is beyond a row's real
width is zero and stays so. Another architecture is another list of operations.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.executors.loading.spec import Spec, frequencies
from octavo.executors.native.checkpoint import Checkpoint
from octavo.executors.native.library import CMatrix, COp, CShape, CStep, Floats, Int32s, Isa, Kind, Mode, OpKind, int32s
from octavo.executors.native.matrix import LANES, Arena, Rows, fill, matrix_of, size_of, storage

X, QKV, MIXED, INNER = range(4)


def up(n: int) -> int:
    """To whole vectors."""
    return -(-n // LANES) * LANES


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool that a model is made with."""

    blocks: int
    block_size: int
    kind: Kind


def kv_bytes(spec: Spec, kind: Kind) -> int:
    """Bytes of KV a token takes."""
    cell = 2 if kind is Kind.BF16 else 4
    return spec.layers * spec.kv_heads * (spec.head_dim + up(spec.head_dim)) * cell


class Weights:
    """Packed weights: what of a model does not depend on the pool."""

    def __init__(self, library: ctypes.CDLL, checkpoint: Checkpoint, *, exact: bool) -> None:
        self.library = library
        self.spec = checkpoint.spec
        self.exact = exact
        spec = checkpoint.spec
        plans = {name: storage(parts, exact) for name, parts in checkpoint.matrices.items()}
        self.matrices: dict[str, CMatrix] = {}
        for name, (kind, parts) in plans.items():
            rows = 2 * up(spec.inner) if name.endswith("gate_up") else sum(len(part.order) for part in parts)
            self.matrices[name] = matrix_of(library, kind, rows, parts[0].cols)
        self.arena = Arena(sum(map(size_of, self.matrices.values())))
        for matrix in self.matrices.values():
            matrix.data = self.arena.take(size_of(matrix))
        work = [
            (self.matrices[name], part, targets)
            for name, (_, parts) in plans.items()
            for part, targets in zip(parts, _targets(name, parts), strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            list(threads.map(lambda item: fill(library, *item), work))
        self.vectors = {name: self._padded(name, vector) for name, vector in checkpoint.vectors.items()}
        angles = np.outer(np.arange(spec.context, dtype=np.float32), frequencies(spec.rope, spec.head_dim))
        self.angles: Floats = np.ascontiguousarray(np.stack([np.cos(angles), np.sin(angles)]), dtype=np.float32)

    def _padded(self, name: str, vector: Floats) -> Floats:
        if name.endswith("gate_up.bias"):
            width = up(self.spec.inner)
            both = np.zeros((width // LANES, 2, LANES), dtype=np.float32)
            for i, half in enumerate(np.split(vector, 2)):
                both[:, i] = np.pad(half, (0, width - len(half))).reshape(-1, LANES)
            return both.reshape(-1)
        return np.pad(vector, (0, up(len(vector)) - len(vector))).astype(np.float32)


def _targets(name: str, parts: list[Rows]) -> list[Int32s]:
    """Where the rows of each part go: one after the other, or blocks of gate and up rows in turn."""
    if name.endswith("gate_up"):
        rows = [np.arange(len(part.order), dtype=np.int32) for part in parts]
        return [r // LANES * 2 * LANES + i * LANES + r % LANES for i, r in enumerate(rows)]
    starts = itertools.accumulate((len(part.order) for part in parts), initial=0)
    return [start + np.arange(len(part.order), dtype=np.int32) for start, part in zip(starts, parts, strict=False)]


class Inputs(NamedTuple):
    """A step's tokens, flat: see `OctStep`. `logit_rows` is -1 for a sample that wants its best token only."""

    ids: Int32s
    positions: Int32s
    sequences: Int32s
    tables: Int32s
    table_start: Int32s
    sample_rows: Int32s
    logit_rows: Int32s
    copy_source: Int32s
    copy_target: Int32s


class Outputs(NamedTuple):
    """By sample: best token, and whether its logits are finite; logits by row; by token, whether it is finite."""

    best: Int32s
    sample_finite: list[bool]
    logits: Floats
    finite: list[bool]


class StepError(RuntimeError):
    """A step that cannot be run as it was laid out: a bug of ours."""


class Native:
    """A model with its KV pool and threads."""

    def __init__(self, weights: Weights, pool: Pool, threads: int, isa: Isa | None = None) -> None:
        spec, library = weights.spec, weights.library
        self.weights = weights
        self.pool = pool
        self.isa = Isa(library.oct_isa_best()) if isa is None else isa
        self._library = library
        self._shape = CShape(
            spec.layers, spec.kv_heads, spec.head_dim, pool.blocks, pool.block_size, pool.kind, spec.context,
            weights.exact, threads, self.isa,
        )  # fmt: skip
        ops = program(weights)
        self._ops = (COp * len(ops))(*ops)
        qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._widths = int32s([up(spec.hidden), up(qkv), up(spec.heads * spec.head_dim), up(spec.inner)])
        self._model: int | None = library.oct_model_new(
            self._shape, ctypes.addressof(self._ops), len(ops), self._widths.ctypes.data, len(self._widths),
            weights.angles.ctypes.data,
        )  # fmt: skip
        if self._model is None:
            raise ModelError(
                f"no memory for a pool of {pool.blocks} blocks (lower kv.tokens), or over 2000 operations: {len(ops)}"
            )

    def __del__(self) -> None:
        if getattr(self, "_model", None) is not None:
            self._library.oct_model_free(self._model)
            self._model = None

    def step(self, inputs: Inputs) -> Outputs:
        tokens, samples = len(inputs.ids), len(inputs.sample_rows)
        rows = int(inputs.logit_rows.max(initial=-1)) + 1
        best, sample_finite = np.zeros(samples, np.int32), np.zeros(samples, np.uint8)
        logits, finite = np.empty((rows, self.weights.spec.vocab_size), np.float32), np.zeros(tokens, np.uint8)
        step = CStep(tokens, samples, len(inputs.copy_source), len(inputs.table_start) - 1)
        for name, array in inputs._asdict().items():
            setattr(step, name, array.ctypes.data)
        step.best, step.sample_finite = best.ctypes.data, sample_finite.ctypes.data
        step.logits, step.finite = logits.ctypes.data, finite.ctypes.data
        if code := self._library.oct_step(self._model, step):
            raise StepError(f"the step library refuses a step: {self._library.oct_error(code).decode()}")
        return Outputs(best, sample_finite.astype(bool).tolist(), logits, finite.astype(bool).tolist())


def program(weights: Weights) -> list[COp]:
    """The operations of a Llama-family model."""
    spec, matrices, vectors = weights.spec, weights.matrices, weights.vectors

    def op(kind: OpKind, source: int, target: int, name: str = "", norm: str = "", mode: Mode = Mode.STORE) -> COp:
        made = COp(kind=kind, mode=mode, source=source, target=target, heads=spec.heads)
        made.eps, made.scale = spec.norm_eps, spec.head_dim**-0.5
        if name:
            made.matrix = ctypes.pointer(matrices[name])
        if norm:
            made.norm = vectors[norm].ctypes.data
        if (bias := vectors.get(f"{name}.bias")) is not None:
            made.bias = bias.ctypes.data
        return made

    ops = [op(OpKind.EMBED, X, X, "embed")]
    for i in range(spec.layers):
        attend = op(OpKind.ATTEND, QKV, MIXED)
        attend.layer = i
        ops += [
            op(OpKind.LINEAR, X, QKV, f"{i}.qkv", f"{i}.attn_norm"),
            attend,
            op(OpKind.LINEAR, MIXED, X, f"{i}.o", mode=Mode.ADD),
            op(OpKind.LINEAR, X, INNER, f"{i}.gate_up", f"{i}.mlp_norm", Mode.GATED),
            op(OpKind.LINEAR, INNER, X, f"{i}.down", mode=Mode.ADD),
        ]
    ops.append(op(OpKind.HEAD, X, X, "head" if "head" in matrices else "embed", "norm"))
    return ops
