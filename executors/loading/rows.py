"""Rows of a matrix as a file stores them, with what they are in floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import BLOCK_LAYOUT, GgmlType

Int32s: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class Rows(NamedTuple):
    """Some rows of a matrix: `data` in the format `kind`, row after row. Row i of ours is row `order[i]` of theirs.
    With `columns`, column j of `data` is column `columns[j]` of the matrix.

    `origin` is the format of the file where that is another: `data` is then made when it is asked for."""

    data: Bytes | Callable[[], Bytes]
    kind: GgmlType
    order: Int32s
    cols: int
    origin: str = ""
    columns: Int32s | None = None

    @classmethod
    def stored(cls, data: Bytes | Callable[[], Bytes], kind: GgmlType, rows: int, cols: int) -> Rows:
        return cls(data, kind, np.arange(rows, dtype=np.int32), cols)

    @classmethod
    def of_floats(cls, values: Floats) -> Rows:
        data = np.ascontiguousarray(values, dtype=np.float32).view(np.uint8).reshape(-1)
        return cls.stored(data, GgmlType.F32, len(values), values.shape[1])

    @property
    def bytes(self) -> Bytes:
        return self.data() if callable(self.data) else self.data

    @property
    def foreign(self) -> bool:
        """Floats stand for what the file has."""
        return bool(self.origin) and self.kind is GgmlType.F32

    @property
    def row_bytes(self) -> int:
        columns, size = BLOCK_LAYOUT[self.kind]
        return self.cols // columns * size

    def slice(self, start: int, end: int) -> Rows:
        """Stored rows [start, end)."""

        def part() -> Bytes:
            return self.bytes[start * self.row_bytes : end * self.row_bytes]

        data = part if callable(self.data) else part()
        order = np.arange(end - start, dtype=np.int32)
        return self._replace(data=data, order=order)

    def floats(self) -> Floats:
        """The numbers that they stand for, [stored rows, cols]: rows in the file's order, columns in the matrix's."""
        try:
            rows = self.bytes.reshape(-1, self.row_bytes)
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(self.kind)))
        except NotImplementedError:
            raise ModelError(f"weights quantised as {self.kind.name} cannot be read") from None
        found = np.asarray(values, dtype=np.float32).reshape(-1, self.cols)
        if self.columns is None:
            return found
        natural = np.empty_like(found)
        natural[:, self.columns] = found
        return natural

    def ours(self) -> Floats:
        """The same, in our order."""
        return self.floats()[self.order]
