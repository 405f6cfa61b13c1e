"""What a cubin says of itself: registers, stack and static shared memory of each kernel. A cubin is a 64-bit ELF file.

Reads the assembler's own notes (sections `.nv.info`), so it tells of a file however that was made, and a test can hold
it against what the compiler said. The numbers of the notes are as `cuobjdump` and `nvdisasm` print them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SYMBOLS = 2  # SHT_SYMTAB
_WITH_VALUE = 4  # the form of a note that has bytes of its own
_REGISTERS, _FRAME = 0x2F, 0x11
_SHARED = ".nv.shared."


class Used(NamedTuple):
    """By one thread, but for `shared`: bytes of a block that are there at each launch."""

    registers: int
    stack: int
    shared: int


class _Section(NamedTuple):
    name: int
    kind: int
    offset: int
    size: int
    link: int


def used(cubin: bytes) -> dict[str, Used]:
    """By the names that kernels have in the file. Raises `ValueError` for what is not a cubin."""
    if cubin[:5] != b"\x7fELF\x02" or len(cubin) < 64:
        raise ValueError("this is not a cubin: it does not begin as a 64-bit ELF file does")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = []
    for i in range(count):
        name, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", cubin, start + i * size)
        sections.append(_Section(name, kind, offset, length, link))

    def text(table: _Section, at: int) -> str:
        begin = table.offset + at
        return cubin[begin : cubin.index(b"\0", begin)].decode()

    titles = [text(sections[names], section.name) for section in sections]
    symbols = next((section for section in sections if section.kind == _SYMBOLS), None)
    if symbols is None or ".nv.info" not in titles:
        raise ValueError("this ELF file has no notes on kernels (.nv.info): it is not a cubin")
    shared = {title.removeprefix(_SHARED): section.size for title, section in zip(titles, sections, strict=True)}
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    for kind, symbol, value in _notes(cubin, sections[titles.index(".nv.info")]):
        (name,) = struct.unpack_from("<I", cubin, symbols.offset + 24 * symbol)
        title = text(sections[symbols.link], name)
        if kind == _REGISTERS:
            registers[title] = value
        elif kind == _FRAME:
            stack[title] = value
    return {title: Used(n, stack.get(title, 0), shared.get(title, 0)) for title, n in registers.items()}


def _notes(cubin: bytes, section: _Section) -> Iterator[tuple[int, int, int]]:
    """Kind, symbol and number of those that say one number of one symbol."""
    at = section.offset
    while at < section.offset + section.size:
        form, kind, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == _WITH_VALUE:
            if size == 8:
                yield (kind, *struct.unpack_from("<II", cubin, at))
            at += size
