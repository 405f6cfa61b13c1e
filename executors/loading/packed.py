"""Weights that a folder keeps as small integers, packed into 32-bit words: GPTQ, AWQ and compressed-tensors.

    weight[row, column] = scale[row, group] · (number[row, column] - zero[row, group])

`group` is a column's: columns stand in groups of 32, 64, 128 or all in one, or, with GPTQ's `desc_act`, each says its
own: then columns are put in the order of groups, which whoever multiplies has to know. Where groups are whole 32s and
scales are fp16 numbers, this is exactly what GGUF's blocks of 32 hold, and it is given as those: 4 bits with zeros of 8
as Q4_0; with any zero as Q5_0, whose numbers reach from -16 to 15; 8 bits with zeros of 128 as Q8_0. Anything else is
given as the floats that it stands for. Numbers are unpacked when they are asked for, not when the folder is opened.

Facts of the layouts, from the packages that write them (AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors):

- GPTQ: `qweight` [columns · bits / 32, rows], along columns; `qzeros` [groups, rows · bits / 32], along rows; `scales`
  [groups, rows]. The lowest bits come first. Its first format stores a zero less 1 (so 0 as the greatest number), the
  second, `gptq_v2`, as it is.
- AWQ (order `gemm`): `qweight` [columns, rows / 8] and `qzeros` along rows; of a word's eight rows 0, 2, 4, 6 come
  first, then 1, 3, 5, 7.
- compressed-tensors, `pack-quantized`: `weight_packed` [rows, columns · bits / 32] along columns; `weight_scale`
  [rows, groups]; `weight_zero_point` [rows · bits / 32, groups] along rows, if there are any. Signed numbers are stored
  with half of their range added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgmlType
from octavo.executors.loading.rows import Bytes, Floats, Int32s, Rows
from octavo.executors.loading.tensorfile import Tensor

Numbers: TypeAlias = npt.NDArray[np.uint8]
Get: TypeAlias = Callable[[str], Tensor | None]
"""A tensor by the end of its name: `qweight`, `scales` …"""

BLOCK = 32
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_METHODS = "gptq, awq, compressed-tensors and fp8"


class Grid(NamedTuple):
    """`zeros` and `scales` are [rows, groups], `groups` are the columns' own; `numbers` gives [rows, columns]."""

    zeros: Numbers
    scales: Floats
    groups: Int32s
    numbers: Callable[[], Numbers]
    bits: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How a folder's linear layers are packed. `zero_less` is what zeros are stored less by."""

    method: str
    bits: int
    zero_less: int = 0

    def rows(self, get: Get, where: str) -> Rows | None:
        """A layer's rows; None if it is not packed. Raises `ModelError`."""
        grid = {"gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed}[self.method](get, where)
        return grid and rows_of(grid, f"{self.method} {self.bits}-bit")

    def _gptq(self, get: Get, where: str) -> Grid | None:
        if (packed := get("qweight")) is None:
            return None
        scales = _floats(_needed(get, "scales", where), where).T
        zeros = _along_last(_words(_needed(get, "qzeros", where), where), self.bits).T
        words = _words(packed, where)
        columns = len(words) * 32 // self.bits
        zeros = (zeros + np.uint8(self.zero_less)) & np.uint8((1 << self.bits) - 1)
        groups = _in_order(columns, scales.shape[1], where) if (own := get("g_idx")) is None else _int32s(own, where)
        return _checked(
            Grid(zeros, scales, groups, lambda: _along_last(words.T, self.bits), self.bits),
            columns,
            words.shape[1],
            where,
        )

    def _awq(self, get: Get, where: str) -> Grid | None:
        if (packed := get("qweight")) is None:
            return None
        scales = _floats(_needed(get, "scales", where), where).T
        zeros = _awq_rows(_words(_needed(get, "qzeros", where), where))
        words = _words(packed, where)
        groups = _in_order(len(words), scales.shape[1], where)
        return _checked(
            Grid(zeros, scales, groups, lambda: _awq_rows(words), self.bits), len(words), 8 * words.shape[1], where
        )

    def _compressed(self, get: Get, where: str) -> Grid | None:
        if (packed := get("weight_packed")) is None:
            return None
        scales = _floats(_needed(get, "weight_scale", where), where)
        words = _words(packed, where)
        columns = words.shape[1] * 32 // self.bits
        if (shape := get("weight_shape")) is not None:
            given = _integers(shape, where).tolist()
            if len(given) != 2 or not 0 < given[1] <= columns:
                raise ModelError(f"{where}: weight_shape {given} does not go with {columns} packed columns")
            columns = given[1]
        if (stored := get("weight_zero_point")) is None:
            zeros = np.full(scales.shape, 1 << (self.bits - 1), np.uint8)
        else:
            zeros = _along_last(_words(stored, where).T, self.bits).T[: len(scales)]
        own = get("weight_g_idx")
        groups = _in_order(columns, scales.shape[1], where) if own is None else _int32s(own, where)
        numbers = partial(_first_columns, words, self.bits, columns)
        return _checked(Grid(zeros, scales, groups, numbers, self.bits), columns, len(words), where)


def packing_of(how: Mapping[str, Any], folder: object) -> Packing | None:
    """What `quantization_config` says; None for fp8, whose weights are floats. Raises `ModelError` for what cannot be
    read, with the reason."""
    method = how.get("quant_method")
    if method == "fp8":
        return None
    if method == "gptq":
        bits, written = int(how.get("bits", 4)), how.get("checkpoint_format") or "gptq"
        _only(folder, "gptq", "bits", bits, (4, 8))
        _only(folder, "gptq", "checkpoint_format", written, ("gptq", "gptq_v2"))
        if how.get("dynamic"):
            raise ModelError(
                f"{folder} is quantised by gptq with other bits in some layers (dynamic); that cannot be read"
            )
        return Packing("gptq", bits, zero_less=int(written == "gptq"))
    if method == "awq":
        _only(folder, "awq", "bits", int(how.get("bits") or how.get("w_bit") or 4), (4,))
        _only(folder, "awq", "version", str(how.get("version") or "gemm").lower(), ("gemm",))
        return Packing("awq", 4)
    if method == "compressed-tensors":
        written = how.get("format")
        if written in ("float-quantized", "naive-quantized"):
            return None
        _only(folder, "compressed-tensors", "format", written, ("pack-quantized", "float-quantized"))
        widths = sorted({int(group["weights"]["num_bits"]) for group in how.get("config_groups", {}).values()})
        if len(widths) != 1:
            raise ModelError(f"{folder} is quantised by compressed-tensors with {widths} bits; one width can be read")
        _only(folder, "compressed-tensors", "num_bits", widths[0], (4, 8))
        return Packing("compressed-tensors", widths[0])
    raise ModelError(f"{folder} is quantised by {method!r}; of quantised folders {_METHODS} can be read")


def _only(folder: object, method: str, what: str, found: object, known: tuple[object, ...]) -> None:
    if found not in known:
        raise ModelError(
            f"{folder} is quantised by {method} with {what} {found!r}; {' and '.join(map(repr, known))} can be read"
        )


def rows_of(grid: Grid, origin: str) -> Rows:
    """As blocks of 32 where that is exact, else as floats. Columns whose groups are in no order are put in one."""
    rows, columns = len(grid.scales), len(grid.groups)
    order, moved = np.arange(rows, dtype=np.int32), None
    if (np.diff(grid.groups) < 0).any():
        moved = np.argsort(grid.groups, kind="stable").astype(np.int32)
        natural, numbers = grid.groups, grid.numbers
        grid = grid._replace(groups=natural[moved], numbers=lambda: np.ascontiguousarray(numbers()[:, moved]))
    kind = _kind(grid)
    make = partial(_as_floats, grid) if kind is GgmlType.F32 else partial(_as_blocks, grid, kind)
    return Rows(make, kind, order, columns, origin, moved)


def _kind(grid: Grid) -> GgmlType:
    blocks = grid.groups.reshape(-1, BLOCK) if len(grid.groups) % BLOCK == 0 else None
    if blocks is None or (blocks != blocks[:, :1]).any():
        return GgmlType.F32
    with np.errstate(over="ignore"):
        if not np.array_equal(grid.scales.astype(np.float16).astype(np.float32), grid.scales):
            return GgmlType.F32
    middle = (grid.zeros == 1 << (grid.bits - 1)).all()
    if grid.bits == 8:
        return GgmlType.Q8_0 if middle else GgmlType.F32
    return GgmlType.Q4_0 if middle else GgmlType.Q5_0


def _as_floats(grid: Grid) -> Bytes:
    zeros, scales = grid.zeros[:, grid.groups], grid.scales[:, grid.groups]
    values = (grid.numbers().astype(np.float32) - zeros) * scales
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def _as_blocks(grid: Grid, kind: GgmlType) -> Bytes:
    """GGUF's blocks: fp16 scale, fifth bits in one word, then columns i and i + 16 in one byte; or 32 signed bytes."""
    numbers, group = grid.numbers(), grid.groups[::BLOCK]
    blocks = numbers.reshape(len(numbers), -1, BLOCK)
    if kind is GgmlType.Q5_0:
        blocks = blocks + np.uint8(16) - grid.zeros[:, group, None]
    scales = grid.scales[:, group, None].astype(np.float16).view(np.uint8)
    if kind is GgmlType.Q8_0:
        return np.concatenate([scales, blocks ^ np.uint8(128)], axis=-1).reshape(-1)
    halves = blocks & np.uint8(15)
    parts = [scales, halves[..., :16] | halves[..., 16:] << np.uint8(4)]
    if kind is GgmlType.Q5_0:
        parts.insert(1, np.packbits(blocks >> np.uint8(4), axis=-1, bitorder="little"))
    return np.concatenate(parts, axis=-1).reshape(-1)


def _along_last(words: npt.NDArray[np.uint32], bits: int) -> Numbers:
    """[…, n] words to […, n · 32 / bits] numbers, the lowest bits first."""
    whole = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return whole
    return np.stack([whole & np.uint8(15), whole >> np.uint8(4)], axis=-1).reshape(*whole.shape[:-1], -1)


def _awq_rows(words: npt.NDArray[np.uint32]) -> Numbers:
    """[n, rows / 8] words to [rows, n] numbers."""
    stored = _along_last(words, 4).reshape(*words.shape, 8)
    numbers = np.empty_like(stored)
    numbers[..., _AWQ_ORDER] = stored
    return numbers.reshape(len(words), -1).T


def _first_columns(words: npt.NDArray[np.uint32], bits: int, columns: int) -> Numbers:
    return _along_last(words, bits)[:, :columns]


def _in_order(columns: int, groups: int, where: str) -> Int32s:
    if groups < 1 or columns % groups:
        raise ModelError(f"{where}: {columns} columns do not go in {groups} groups")
    return np.arange(columns, dtype=np.int32) // np.int32(columns // groups)


def _checked(grid: Grid, columns: int, rows: int, where: str) -> Grid:
    groups = grid.scales.shape[1]
    if grid.zeros.shape != grid.scales.shape or len(grid.scales) != rows or len(grid.groups) != columns:
        raise ModelError(
            f"{where}: {rows} rows of {columns} packed columns do not go with scales {grid.scales.shape}, "
            f"zeros {grid.zeros.shape} and a group for {len(grid.groups)} columns"
        )
    if len(grid.groups) and not 0 <= grid.groups.min() <= grid.groups.max() < groups:
        wrong = grid.groups[(grid.groups < 0) | (grid.groups >= groups)]
        raise ModelError(f"{where}: a column is in group {int(wrong[0])} of {groups}")
    return grid


def _needed(get: Get, ending: str, where: str) -> Tensor:
    if (tensor := get(ending)) is None:
        raise ModelError(f"{where} has packed numbers but no {ending}")
    return tensor


def _words(tensor: Tensor, where: str) -> npt.NDArray[np.uint32]:
    if tensor.dtype not in ("I32", "U32") or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ModelError(
            f"{where}: packed numbers are {tensor.dtype} of shape {tensor.shape}, 32-bit words were expected"
        )
    return tensor.data.view(np.uint32).reshape(tensor.shape)


def _int32s(tensor: Tensor, where: str) -> Int32s:
    wide = _integers(tensor, where)
    return np.clip(wide, -1, np.iinfo(np.int32).max).astype(np.int32)  # what is outside is so afterwards, too


def _integers(tensor: Tensor, where: str) -> npt.NDArray[np.int64]:
    types = {"I32": np.int32, "I64": np.int64}
    if tensor.dtype not in types:
        raise ModelError(f"{where}: group indices are {tensor.dtype}, whole numbers were expected")
    return tensor.data.view(types[tensor.dtype]).astype(np.int64).reshape(-1)


def _floats(tensor: Tensor, where: str) -> Floats:
    kinds = {"F32": GgmlType.F32, "F16": GgmlType.F16, "BF16": GgmlType.BF16}
    if tensor.dtype not in kinds or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ModelError(f"{where}: scales are {tensor.dtype} of shape {tensor.shape}, a matrix of floats was expected")
    return Rows.stored(tensor.data, kinds[tensor.dtype], *tensor.shape).floats()
