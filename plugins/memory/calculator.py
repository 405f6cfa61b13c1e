"""What a model takes at a context and a concurrency: pure arithmetic over its shape.

A sequence's last block is on average half empty: with blocks of 16 tokens that is 7.5 tokens a sequence and layer. A
layer with a window keeps the window and what the block at each of its ends holds beside it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from octavo.plugins.memory.shape import Layer, Shape

DTYPES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a number in the KV."""

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Need(NamedTuple):
    """Bytes, but for `fits_*`. `per_token` is what one more token takes while no window is full; `waste` is what the
    last blocks hold for nobody, on average, and `waste_most` at worst."""

    per_token: float
    per_sequence: float
    kv: float
    waste: float
    waste_most: float
    weights: int
    total: float
    fits_tokens: int | None
    fits_sequences: int | None


def need(
    shape: Shape,
    *,
    context: int,
    concurrency: int,
    dtype: str = "bf16",
    block_size: int = 16,
    memory: int | None = None,
) -> Need:
    """For `concurrency` sequences of `context` tokens, and what fits into `memory` beside the weights."""
    width = DTYPES[dtype]
    per_token = sum(layer.bytes_in(width) for layer in shape.layers)
    per_sequence = sum(kept(layer, context, block_size) * layer.bytes_in(width) for layer in shape.layers)
    waste = per_token * (block_size - 1) * concurrency
    left = None if memory is None else max(0, memory - shape.weights)
    return Need(
        per_token=per_token,
        per_sequence=per_sequence,
        kv=per_sequence * concurrency,
        waste=waste / 2,
        waste_most=waste,
        weights=shape.weights,
        total=shape.weights + per_sequence * concurrency,
        fits_tokens=None if left is None or not per_token else int(left / per_token),
        fits_sequences=None if left is None or not per_sequence else int(left / per_sequence),
    )


def kept(layer: Layer, context: int, block_size: int) -> int:
    """Tokens for which a layer has room when a sequence is `context` tokens long: whole blocks."""
    whole = -(-context // block_size) * block_size
    if layer.window is None:
        return whole
    return min(whole, (-(-layer.window // block_size) + 1) * block_size)


def parse_size(text: str) -> int:
    """`32k`, `24GiB`, `1000`: a number and a power of 1024. ValueError with what is allowed."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not like 32k, 8192 or 24GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def told(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
