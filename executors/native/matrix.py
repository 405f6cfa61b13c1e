"""How matrices are packed for the step library, and the memory that they are packed into.

A packed matrix keeps what the file says: groups of GGUF stay as they are, floats take the narrowest storage that
loses nothing. What the library does not have is turned into 8-bit groups in fast mode and into fp32 in exact mode.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Literal, TypeAlias

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgmlType
from octavo.executors.loading.rows import Bytes, Int32s, Rows
from octavo.executors.native.library import CMatrix, Kind, int32s

LANES = 16
GROUP = 32
OUTSIDE = -2
Wanted: TypeAlias = Literal["file", "w8", "w4"]
"""`file` keeps the file's numbers; w8 and w4 make groups of 32 columns of floats, not of what has groups already."""
_PACKED = {
    GgmlType.Q4_0: Kind.W4, GgmlType.Q4_1: Kind.W4, GgmlType.Q5_0: Kind.W5, GgmlType.Q5_1: Kind.W5,
    GgmlType.Q8_0: Kind.W8, GgmlType.Q4_K: Kind.K4, GgmlType.Q5_K: Kind.K5, GgmlType.Q6_K: Kind.K6,
}  # fmt: skip
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


def native_kind(kind: GgmlType) -> Kind | None:
    """What the library packs this format as without a loss; None: it does not have it."""
    return {GgmlType.F32: Kind.F32, GgmlType.F16: Kind.F16, GgmlType.BF16: Kind.BF16}.get(kind, _PACKED.get(kind))


def storage(
    parts: list[Rows], exact: bool, wanted: Wanted = "file", *, movable: bool = False
) -> tuple[Kind, list[Rows]]:
    """How to pack a matrix of these parts, and the parts in a format that can be packed so. If it is `movable`, parts
    that all have their columns moved alike stay so."""
    if len(moved := {_moved(part) for part in parts}) > 1 or (moved != {b""} and not movable):
        parts = [_of_floats(part) for part in parts]
    kinds = {part.kind for part in parts}
    packed = {_PACKED.get(kind) for kind in kinds}
    if len(packed) == 1 and (kind := packed.pop()) is not None:
        return kind, parts
    grouped = parts[0].cols % GROUP == 0
    if not kinds <= set(_FLOATS) or any(part.foreign for part in parts):
        parts = [part if part.foreign and part.columns is None else _of_floats(part) for part in parts]
        wanted = "file" if exact else "w8"
    if wanted != "file" and grouped:
        return Kind.W8 if wanted == "w8" else Kind.W4, parts
    if len(kinds) > 1:
        return Kind.F32, parts
    if kinds == {GgmlType.F16}:
        return Kind.F16, parts
    if kinds == {GgmlType.BF16}:
        return Kind.BF16, parts
    if kinds == {GgmlType.F32} and all(_is_bf16(part.bytes) for part in parts):
        return Kind.BF16, parts
    if kinds == {GgmlType.F32} and all(_is_f16(part.bytes) for part in parts):
        return Kind.F16, parts
    return Kind.F32, parts


def movable(name: str) -> bool:
    """Whether a matrix is alone in its operation, which can put its inputs in order; those of experts are not."""
    parts = name.split(".")
    return len(parts) > 1 and not parts[1].isdigit()


def _moved(part: Rows) -> bytes:
    return b"" if part.columns is None else part.columns.tobytes()


def packed_alike(parts: list[Rows]) -> bool:
    return len({(native_kind(part.kind), _moved(part)) for part in parts}) == 1


def _of_floats(part: Rows) -> Rows:
    return Rows.of_floats(part.floats())._replace(order=part.order, origin=part.origin)


def _is_bf16(data: Bytes) -> bool:
    return not (data.view(np.uint32) & 0xFFFF).any()


def _is_f16(data: Bytes) -> bool:
    values = data.view(np.float32)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


class Arena:
    """Memory for packed weights, in huge pages where the system has them; zero until filled."""

    def __init__(self, size: int) -> None:
        # Private: of shared memory most systems make no huge pages.
        self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
        raise ModelError(f"a matrix of {rows} x {cols} cannot be packed as {kind.name}: columns go in whole groups")
    return matrix


def size_of(matrix: CMatrix) -> int:
    return -(-int(matrix.blocks * matrix.block_bytes) // 64) * 64


def fill(library: ctypes.CDLL, matrix: CMatrix, rows: Rows, targets: Int32s) -> None:
    """Pack `rows` as rows `targets` of the matrix. Raises `ModelError` when a target is outside of it, or the numbers
    are not finite."""
    data, order, targets = np.ascontiguousarray(rows.bytes), int32s(rows.order), int32s(targets)
    pointers = data.ctypes.data, len(order), order.ctypes.data, targets.ctypes.data
    code = library.oct_matrix_fill(matrix, int(rows.kind), *pointers)
    if code == OUTSIDE:
        raise ModelError(
            f"rows {int(targets.min())} to {int(targets.max())} cannot be packed into a matrix of {matrix.rows}"
        )
    if code < 0:
        raise ModelError(f"weights stored as {rows.kind.name} cannot be packed as {Kind(matrix.kind).name}")
    if code:
        raise ModelError(
            f"row {int(order[code - 1])} has numbers that are not finite; the file is damaged: fetch it again"
        )
