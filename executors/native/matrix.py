"""Rows of a matrix as a file stores them, and matrices packed for the step library.

A packed matrix keeps what the file says: 4-bit and 8-bit groups of GGUF stay as they are, floats take the narrowest
storage that loses nothing. Only formats the library does not have are turned into others.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

import gguf
import numpy as np

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgmlType
from octavo.executors.native.library import Bytes, CMatrix, Floats, Int32s, Kind, int32s

LANES = 16
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


class Rows(NamedTuple):
    """Some rows of a matrix: `data` in the format `kind`, row after row. Row i of ours is row `order[i]` of theirs."""

    data: Bytes
    kind: GgmlType
    order: Int32s
    cols: int

    @classmethod
    def of_floats(cls, values: Floats) -> Rows:
        data = np.ascontiguousarray(values, dtype=np.float32).view(np.uint8).reshape(-1)
        return cls(data, GgmlType.F32, np.arange(len(values), dtype=np.int32), values.shape[1])

    def floats(self) -> Floats:
        """As the numbers that they stand for, in the file's order."""
        try:
            rows = self.data.reshape(len(self.order), -1)
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(self.kind)))
        except NotImplementedError:
            raise ModelError(f"weights quantised as {self.kind.name} cannot be read") from None
        return np.asarray(values, dtype=np.float32).reshape(len(self.order), self.cols)


def storage(parts: list[Rows], exact: bool) -> tuple[Kind, list[Rows]]:
    """How to pack a matrix of these parts, and the parts in a format that can be packed so."""
    kinds = {part.kind for part in parts}
    if kinds <= {GgmlType.Q4_0, GgmlType.Q4_1}:
        return Kind.W4, parts
    if kinds == {GgmlType.Q8_0}:
        return Kind.W8, parts
    if kinds == {GgmlType.F16}:
        return Kind.F16, parts
    if kinds == {GgmlType.BF16}:
        return Kind.BF16, parts
    if not kinds <= set(_FLOATS):
        parts = [Rows.of_floats(part.floats())._replace(order=part.order) for part in parts]
        return (Kind.F32 if exact or parts[0].cols % 32 else Kind.W8), parts
    if kinds == {GgmlType.F32} and all(_is_bf16(part.data) for part in parts):
        return Kind.BF16, parts
    if kinds == {GgmlType.F32} and all(_is_f16(part.data) for part in parts):
        return Kind.F16, parts
    return Kind.F32, parts


def _is_bf16(data: Bytes) -> bool:
    return not (data.view(np.uint32) & 0xFFFF).any()


def _is_f16(data: Bytes) -> bool:
    values = data.view(np.float32)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


class Arena:
    """Memory for packed weights, in huge pages where the system has them; zero until filled."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._used = 0
        self.size = size

    def take(self, size: int) -> int:
        """The address of `size` bytes, aligned to 64."""
        address = self._base + self._used
        self._used += -(-size // 64) * 64
        if self._used > self.size:
            raise MemoryError(f"an arena of {self.size} bytes has no room for {size} more")
        return address


def matrix_of(library: ctypes.CDLL, kind: Kind, rows: int, cols: int) -> CMatrix:
    """A matrix without memory; its size is `size_of`."""
    matrix = CMatrix()
    if library.oct_matrix_shape(matrix, kind, rows, cols):
        raise ModelError(f"a matrix of {rows} x {cols} cannot be packed as {kind.name}: columns go in groups of 32")
    return matrix


def size_of(matrix: CMatrix) -> int:
    return -(-int(matrix.blocks * matrix.block_bytes) // 64) * 64


def fill(library: ctypes.CDLL, matrix: CMatrix, rows: Rows, targets: Int32s) -> None:
    """Pack `rows` as rows `targets` of the matrix."""
    data, order, targets = np.ascontiguousarray(rows.data), int32s(rows.order), int32s(targets)
    pointers = data.ctypes.data, len(order), order.ctypes.data, targets.ctypes.data
    if library.oct_matrix_fill(matrix, int(rows.kind), *pointers):
        raise ModelError(f"weights stored as {rows.kind.name} cannot be packed as {Kind(matrix.kind).name}")
