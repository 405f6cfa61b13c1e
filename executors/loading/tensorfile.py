"""A small reader for safetensors files: where each tensor's bytes are. Mapped, not read; no torch.

    length of the header (8 bytes) │ header: JSON {name: {dtype, shape, data_offsets}} │ data

Every number of the header is checked against the file, so a cut or hostile one ends in a `ModelError`.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.core.models.errors import ModelError

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1,
}  # fmt: skip


class Tensor(NamedTuple):
    """`data` are its bytes, read-only; they keep the mapping alive."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises `ModelError` when it is not whole."""
    size = path.stat().st_size
    if size < 8:
        raise ModelError(f"{path} is not a safetensors file: it has {size} bytes")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start > size:
        raise ModelError(f"{path} has {size} bytes, its header alone should end at {start}; fetch it again")
    try:
        header: dict[str, Any] = json.loads(mapped[8:start])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is {type(header).__name__}, not an object")
    whole = np.frombuffer(mapped, dtype=np.uint8)
    return {name: _tensor(path, name, entry, whole[start:]) for name, entry in header.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8]) -> Tensor:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelError(f"{path}: the entry of tensor {name} is damaged: {entry!r}") from None
    if dtype not in SIZES:
        raise ModelError(f"{path}: tensor {name} is stored as {dtype}, which cannot be read")
    if not 0 <= first <= last <= len(data):
        raise ModelError(
            f"{path}: tensor {name} ends {last - len(data)} bytes past the end of the file; "
            "it is cut short: fetch it again"
        )
    if min(shape, default=0) < 0 or last - first != math.prod(shape) * SIZES[dtype]:
        raise ModelError(f"{path}: tensor {name} of shape {shape} in {dtype} cannot take {last - first} bytes")
    return Tensor(dtype, shape, data[first:last])
