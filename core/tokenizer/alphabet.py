"""The alphabet of byte-level BPE (Radford et al., GPT-2): each byte is written as one printable character."""

from __future__ import annotations


def _byte_of_char() -> dict[str, int]:
    """Printable bytes of Latin-1 stand for themselves; the others are moved, in order, to U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(moved)}


BYTE_OF_CHAR: dict[str, int] = _byte_of_char()
CHAR_OF_BYTE: dict[int, str] = {byte: char for char, byte in BYTE_OF_CHAR.items()}
