"""The GGUF reader gives what was written, and no file, however damaged, gets more from it than a GgufError."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.models.errors import GgufError
from octavo.core.models.gguf import GgmlType, GgufFile, TensorInfo

_KINDS = {bool: (7, "<?"), int: (5, "<i"), float: (6, "<f")}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    kind, form = _KINDS[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[GgmlType, tuple[int, ...], bytes]], version: int = 3
) -> Path:
    table, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        table += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        table += struct.pack("<IQ", kind, len(data))
        data += raw
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items()) + table
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


METADATA = {
    "general.architecture": "llama",
    "a.number": -7,
    "a.flag": True,
    "a.list": [1, 2, 3],
    "some.words": ["a", "", "Ġé"],
    "nested": [[1, 2], [3, 4]],
}
TENSORS: dict[str, tuple[GgmlType, tuple[int, ...], bytes]] = {
    "plain": (GgmlType.F32, (2, 3), np.arange(6, dtype="<f4").tobytes()),
    "quantised": (GgmlType.Q8_0, (4, 32), bytes(range(4 * 34))),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", METADATA, TENSORS)


@pytest.mark.parametrize("version", [2, 3])
def test_what_was_written_is_read(tmp_path: Path, version: int) -> None:
    file = GgufFile(write_gguf(tmp_path / "small.gguf", METADATA, TENSORS, version))
    assert file.metadata == METADATA
    assert file.tensors["plain"][:3] == ("plain", (2, 3), GgmlType.F32)
    assert file.tensors["quantised"].nbytes == 4 * 34
    assert np.array_equal(file.data("plain").view("<f4"), np.arange(6))
    assert file.data("quantised").tobytes() == bytes(range(4 * 34))


def test_tensor_bytes_outlive_the_reader_and_cannot_be_written(small: Path) -> None:
    data = GgufFile(small).data("plain")
    assert data.view("<f4")[5] == 5
    assert not data.flags.writeable


def test_a_file_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError):
            GgufFile(cut)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(small: Path, data: st.DataObject) -> None:
    damaged = bytearray(small.read_bytes())
    at = data.draw(st.integers(0, len(damaged) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
    damaged[at : at + len(patch)] = patch
    path = small.with_name("damaged.gguf")
    path.write_bytes(damaged)
    try:
        file = GgufFile(path)
    except GgufError:
        return
    for tensor in file.tensors.values():
        assert len(file.data(tensor.name)) == tensor.nbytes


def test_a_huge_length_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    for key_type in (8, 9):
        tail = struct.pack("<I", key_type) + (struct.pack("<I", 8) if key_type == 9 else b"") + struct.pack("<Q", 2**62)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _string("k") + tail + b"\0" * 64)
        with pytest.raises(GgufError, match="k "):
            GgufFile(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\3\4" + b"\0" * 60, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 60, "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 60, "big-endian"),
        (b"", "not a GGUF file"),
    ],
)
def test_a_foreign_file_is_refused_by_what_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=says):
        GgufFile(path)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "part.gguf", {"split.count": 3}, {})
    with pytest.raises(GgufError, match="one of 3 parts"):
        GgufFile(path)


def test_a_tensor_table_entry_says_where_its_bytes_are(small: Path) -> None:
    tensor = GgufFile(small).tensors["quantised"]
    assert isinstance(tensor, TensorInfo)
    assert small.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == bytes(range(4 * 34))
