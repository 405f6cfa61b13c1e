"""LoRA adapters packed for the step library, beside the products that they add to (see kernels/cpu/adapt.h).

An adapter's numbers are kept as they are: in 16 bits where that loses nothing, else in fp32. In both modes it is
computed in fp32, from the rows that the product beside it has.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate

import numpy as np

from octavo.executors.loading.peft import Lora, Part
from octavo.executors.loading.rows import Floats, Rows
from octavo.executors.loading.spec import Spec
from octavo.executors.native.library import CAdapter, CMatrix, CPart, int32s
from octavo.executors.native.matrix import LANES, Arena, fill, matrix_of, size_of, storage
from octavo.executors.native.program import SITES


class Packed:
    """One adapter in memory of its own."""

    def __init__(self, library: ctypes.CDLL, lora: Lora, spec: Spec) -> None:
        self._matrices: list[tuple[CMatrix, Rows, int]] = []
        """With their numbers, and the row that these begin at."""
        self._library = library
        parts: list[CPart] = []
        counts: list[int] = []
        for i in range(spec.layers):
            for site in SITES:
                name = f"{i}.gate_up" if site == "up" and spec.gated else f"{i}.{site}"
                made = [piece for part in lora.parts.get(name, ()) for piece in self._pieces(part, name, spec)]
                parts += made
                counts.append(len(made))
        self._arena = Arena(sum(size_of(matrix) for matrix, _, _ in self._matrices))
        for matrix, rows, first in self._matrices:
            matrix.data = self._arena.take(size_of(matrix))
            fill(library, matrix, rows, int32s(first + np.arange(len(rows.order))))
        self._first = int32s(list(accumulate(counts, initial=0)))
        self._parts = (CPart * len(parts))(*parts)
        self.c = CAdapter(self._first.ctypes.data, ctypes.addressof(self._parts))

    @property
    def nbytes(self) -> int:
        return self._arena.size

    def _pieces(self, part: Part, name: str, spec: Spec) -> list[CPart]:
        """Where gate and up rows stand in turn, a part for each of the two."""
        down = self._matrix(part.down, 0)
        if not name.endswith("gate_up"):
            block, shift = divmod(part.start, LANES)
            return [CPart(down, self._matrix(part.up, shift), block, 1)]
        start, stop = part.start, part.start + len(part.up)
        halves = [(max(start, half * spec.inner), min(stop, (half + 1) * spec.inner), half) for half in (0, 1)]
        return [
            CPart(down, self._matrix(part.up[first - start : last - start], 0), half, 2)
            for first, last, half in halves
            if first < last
        ]

    def _matrix(self, values: Floats, first: int) -> ctypes._Pointer[CMatrix]:
        kind, (rows,) = storage([Rows.of_floats(values)], exact=True)
        matrix = matrix_of(self._library, kind, first + len(values), values.shape[1])
        self._matrices.append((matrix, rows, first))
        return ctypes.pointer(matrix)
