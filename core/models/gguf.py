"""A small reader for GGUF files (versions 2 and 3): metadata, and where each tensor's bytes are.

    magic, version, tensor count, metadata count │ metadata │ tensor table │ padding │ tensor data
                                                                                     └ each tensor aligned

The file is mapped, not read: tensor bytes are touched only by whoever uses them. Every length is checked
against what is left of the file before anything is allocated, so a cut or hostile file ends in a `GgufError`.
Knows nothing of how quantised bytes become numbers.
"""

from __future__ import annotations

import math
import mmap
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.core.models.errors import GgufError

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_MAX_NESTING = 4
_MIN_KEY_VALUE = 8 + 4 + 1
_MIN_TENSOR = 8 + 4 + 4 + 8


class GgmlType(IntEnum):
    """How a tensor's numbers are stored, by the format's own numbers."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


BLOCK_LAYOUT: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.BF16: (1, 2),
    GgmlType.F64: (1, 8),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.MXFP4: (32, 17),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
}
"""Per type: numbers in a quantisation block, and bytes it takes."""


class TensorInfo(NamedTuple):
    """One entry of the tensor table. `shape` is row-major, outermost first (the file has it the other way
    round); a matrix is [outputs, inputs]. `offset` is from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    offset: int
    nbytes: int


class GgufFile:
    """A mapped GGUF file. Raises `GgufError` when it is not one, `OSError` when it cannot be opened.

    The mapping lives as long as this object or any array from `data`."""

    metadata: dict[str, Any]
    """Key to bool, int, float, str or a list of these, as in the file."""
    tensors: dict[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            if self.path.stat().st_size < 24:
                raise GgufError(f"{self.path} is not a GGUF file: it is shorter than a GGUF header (24 bytes)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _Reader(self._map, str(self.path))
        tensor_count, key_count = _read_header(reader)
        self.metadata = _read_metadata(reader, key_count)
        if (parts := self.metadata.get("split.count", 1)) != 1:
            raise GgufError(
                f"{self.path} is one of {parts} parts of a split model; merge them first (llama-gguf-split --merge)"
            )
        self.tensors = _read_tensors(reader, tensor_count, self.metadata)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's stored bytes, shape [nbytes], read-only, not copied. `KeyError` if there is no such tensor."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)


class _Reader:
    """A cursor over the mapped file. Every read is checked against the file's end."""

    def __init__(self, buffer: mmap.mmap, path: str) -> None:
        self.buffer = buffer
        self.path = path
        self.size = len(buffer)
        self.at = 0

    def fail(self, why: str) -> GgufError:
        return GgufError(f"{self.path}: {why} (at byte {self.at} of {self.size})")

    def take(self, nbytes: int, what: str) -> int:
        """Move past `nbytes` and return where they start."""
        start = self.at
        if nbytes > self.size - start:
            raise self.fail(
                f"{what} needs {nbytes} bytes, {self.size - start} are left; the file is cut short or damaged"
            )
        self.at = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return int.from_bytes(self.buffer[self.take(4, what) : self.at], "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.buffer[self.take(8, what) : self.at], "little")

    def string(self, what: str) -> str:
        length = self.u64(what)
        raw = self.buffer[self.take(length, what) : self.at]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from None

    def strings(self, count: int, what: str) -> list[str]:
        """Many strings; a vocabulary has 100 000 of them, hence the tight loop."""
        unpack, buffer, size, at = struct.Struct("<Q").unpack_from, self.buffer, self.size, self.at
        out: list[str] = []
        try:
            for _ in range(count):
                end = at + 8 + unpack(buffer, at)[0]
                if end > size:
                    break
                out.append(buffer[at + 8 : end].decode("utf-8"))
                at = end
        except struct.error:
            pass  # fewer than 8 bytes are left: told below
        except UnicodeDecodeError as error:
            raise self.fail(f"string {len(out)} of {what} is not UTF-8: {error.reason}") from None
        if len(out) < count:
            raise self.fail(
                f"{what} has {count} strings, the file ends in number {len(out)}; it is cut short or damaged"
            )
        self.at = at
        return out


_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""The format's numbers for the types of metadata values."""


def _read_header(reader: _Reader) -> tuple[int, int]:
    magic = reader.buffer[reader.take(4, "the header") : reader.at]
    if magic != _MAGIC:
        raise GgufError(f"{reader.path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    version = reader.u32("the version")
    if version not in (2, 3):
        hint = " (big-endian files are not supported)" if version in (2 << 24, 3 << 24) else ""
        raise GgufError(f"{reader.path} is GGUF version {version}; versions 2 and 3 can be read{hint}")
    tensor_count, key_count = reader.u64("the tensor count"), reader.u64("the metadata count")
    left = reader.size - reader.at
    if tensor_count * _MIN_TENSOR + key_count * _MIN_KEY_VALUE > left:
        raise reader.fail(f"{tensor_count} tensors and {key_count} metadata entries cannot fit in {left} bytes")
    return tensor_count, key_count


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string("a metadata key")
        if key in metadata:
            raise reader.fail(f"metadata key {key!r} is there twice")
        metadata[key] = _read_value(reader, reader.u32(f"the type of {key}"), key, _MAX_NESTING)
    return metadata


def _read_value(reader: _Reader, kind: int, key: str, nesting: int) -> Any:
    if kind == _STRING:
        return reader.string(key)
    if kind == _ARRAY:
        return _read_array(reader, key, nesting)
    if (dtype := _SCALARS.get(kind)) is None:
        raise reader.fail(f"{key} has the unknown metadata type {kind}")
    return np.frombuffer(reader.buffer, dtype, 1, reader.take(dtype.itemsize, key))[0].item()


def _read_array(reader: _Reader, key: str, nesting: int) -> list[Any]:
    if nesting == 0:
        raise reader.fail(f"{key} is an array nested more than {_MAX_NESTING} deep")
    kind, count = reader.u32(key), reader.u64(key)
    if dtype := _SCALARS.get(kind):
        start = reader.take(count * dtype.itemsize, key)
        values: list[Any] = np.frombuffer(reader.buffer, dtype, count, start).tolist()
        return values
    if count * 8 > reader.size - reader.at:  # a string or an array takes at least 8 bytes
        raise reader.fail(f"{key} cannot have {count} entries in what is left of the file")
    if kind == _STRING:
        return reader.strings(count, key)
    return [_read_value(reader, kind, key, nesting - 1) for _ in range(count)]


def _read_tensors(reader: _Reader, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.fail(f"general.alignment is {alignment!r}, not a positive number")
    table = [_read_tensor(reader) for _ in range(count)]
    data_start = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in table:
        tensor = entry._replace(offset=data_start + entry.offset)
        if tensor.name in tensors:
            raise reader.fail(f"tensor {tensor.name!r} is there twice")
        if tensor.offset + tensor.nbytes > reader.size:
            raise reader.fail(
                f"tensor {tensor.name!r} ends at byte {tensor.offset + tensor.nbytes}, past the end of the file; "
                "it is cut short: fetch it again"
            )
        tensors[tensor.name] = tensor
    return tensors


def _read_tensor(reader: _Reader) -> TensorInfo:
    """An entry of the table; its offset still counts from the start of the data."""
    name = reader.string("a tensor's name")
    dims = reader.u32(name)
    if dims > _MAX_DIMS:
        raise reader.fail(f"tensor {name!r} has {dims} dimensions, at most {_MAX_DIMS} are allowed")
    shape = tuple(reader.u64(name) for _ in range(dims))[::-1]
    number, offset = reader.u32(name), reader.u64(name)
    try:
        kind = GgmlType(number)
    except ValueError:
        raise reader.fail(f"tensor {name!r} has the unknown type {number}") from None
    per_block, block_bytes = BLOCK_LAYOUT[kind]
    if shape and shape[-1] % per_block:
        raise reader.fail(
            f"tensor {name!r} has rows of {shape[-1]} numbers, {kind.name} needs a multiple of {per_block}"
        )
    return TensorInfo(name, shape, kind, offset, math.prod(shape) // per_block * block_bytes)
