"""A checkpoint's weights as the step library wants them: one arena of packed matrices, and vectors padded to whole
vectors of 16. What of a model does not depend on its KV pool; knows nothing of operations or steps."""

from __future__ import annotations

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.executors.loading.checkpoint import Checkpoint
from octavo.executors.loading.rope import angles
from octavo.executors.loading.rows import Rows
from octavo.executors.native.library import CMatrix, Floats, Int32s
from octavo.executors.native.matrix import (
    LANES,
    Arena,
    Wanted,
    fill,
    matrix_of,
    movable,
    packed_alike,
    size_of,
    storage,
)
from octavo.executors.threads import default_threads


def up(n: int) -> int:
    """To whole vectors."""
    return -(-n // LANES) * LANES


class Weights:
    """Packed weights: what of a model does not depend on the pool. `wanted` says what to make of floats;
    `context` is the longest text that will be run, the model's own limit if None."""

    def __init__(
        self,
        library: ctypes.CDLL,
        checkpoint: Checkpoint,
        *,
        exact: bool,
        wanted: Wanted = "file",
        context: int | None = None,
    ) -> None:
        self.library = library
        self.spec = spec = checkpoint.spec
        self.exact = exact
        self.context = min(context or spec.context, spec.context)
        plans = {
            name: (rows, *storage(parts, exact, "file" if name.endswith("router") else wanted, movable=movable(name)))
            for whole, stacked in checkpoint.matrices.items()
            for name, rows, parts in _split(whole, stacked)
        }
        self.matrices: dict[str, CMatrix] = {}
        for name, (rows, kind, parts) in plans.items():
            self.matrices[name] = matrix_of(library, kind, rows, parts[0].cols)
        self.arena = Arena(sum(map(size_of, self.matrices.values())))
        for matrix in self.matrices.values():
            matrix.data = self.arena.take(size_of(matrix))
        work = [
            (name, part, targets)
            for name, (_, _, parts) in plans.items()
            for part, targets in zip(parts, _targets(name, parts), strict=True)
        ]
        with ThreadPoolExecutor(default_threads()) as threads:
            list(threads.map(lambda item: self._fill(*item), work))
        self.columns = {name: parts[0].columns for name, (_, _, parts) in plans.items() if parts[0].columns is not None}
        """Of matrices whose columns are moved: where each of them was."""
        self.vectors = {name: self._padded(name, vector) for name, vector in checkpoint.vectors.items()}
        if spec.slopes:
            self.vectors["slopes"] = np.array(spec.slopes, dtype=np.float32)
        self.rows: list[ctypes.Array[CMatrix]] = []
        """Matrices of experts side by side, as operations want them."""
        self.angles = [angles(rope, spec.head_dim, self.context) for rope in spec.ropes]

    @property
    def head(self) -> str:
        """The matrix that gives the logits."""
        return "head" if "head" in self.matrices else "embed"

    def _fill(self, name: str, part: Rows, targets: Int32s) -> None:
        try:
            fill(self.library, self.matrices[name], part, targets)
        except ModelError as error:
            raise ModelError(f"weight {name}: {error}") from None

    def _padded(self, name: str, vector: Floats) -> Floats:
        if name.endswith("gate_up.bias"):
            width = up(len(vector) // 2)
            both = np.zeros((width // LANES, 2, LANES), dtype=np.float32)
            for i, half in enumerate(np.split(vector, 2)):
                both[:, i] = np.pad(half, (0, width - len(half))).reshape(-1, LANES)
            return both.reshape(-1)
        return np.pad(vector, (0, up(len(vector)) - len(vector))).astype(np.float32)


def _split(name: str, parts: list[Rows]) -> list[tuple[str, int, list[Rows]]]:
    """A matrix as (name, rows, parts): itself, or its parts apart when they are packed in different ways."""
    sizes = [len(part.order) for part in parts]
    if name.endswith("gate_up"):
        return [(name, 2 * up(sizes[0]), parts)]
    if not packed_alike(parts) and all(size % LANES == 0 for size in sizes):
        return [(f"{name}.{i}", size, [part]) for i, (size, part) in enumerate(zip(sizes, parts, strict=True))]
    return [(name, sum(sizes), parts)]


def _targets(name: str, parts: list[Rows]) -> list[Int32s]:
    """Where the rows of each part go: one after the other, or blocks of gate and up rows in turn."""
    if name.endswith("gate_up"):
        rows = [np.arange(len(part.order), dtype=np.int32) for part in parts]
        return [r // LANES * 2 * LANES + i * LANES + r % LANES for i, r in enumerate(rows)]
    starts = itertools.accumulate((len(part.order) for part in parts), initial=0)
    return [start + np.arange(len(part.order), dtype=np.int32) for start, part in zip(starts, parts, strict=False)]
