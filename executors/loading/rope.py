"""Rotary embedding and its variants: frequencies, and how far a scaled model reaches.

Su et al., RoFormer (2021); position interpolation: Chen et al. (2023); YaRN: Peng et al. (2023). Numbers are those of
transformers, whose config keys and defaults the files follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """`kind` is

    - default
    - linear: positions are divided by `factor`
    - dynamic: the base grows as for a text of `factor` times `original_context`. It is the same for every text: one
      that changed as a text grows would make keys that are cached already wrong
    - llama3: wavelengths from `original_context / low_freq_factor` on are stretched by `factor`, those below
      `original_context / high_freq_factor` not at all
    - yarn: frequencies between `beta_fast` and `beta_slow` turns in `original_context` go over from their own value
      to one divided by `factor`
    - factors: each frequency is divided by an own number that the file brings
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    dims: int = 0
    """Of a head, its first ones, that are rotated; 0 is all."""
    scale: float = 1.0
    """Of cosines and sines."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def frequencies(rope: Rope, head_dim: int) -> Floats:
    """Angle per position of each pair of dimensions, shape [rotated dimensions / 2]."""
    dims, theta = rope.dims or head_dim, rope.theta
    if rope.kind == "dynamic":
        theta *= (rope.factor**2 - (rope.factor - 1)) ** (dims / (dims - 2))
    inverse = 1.0 / theta ** (np.arange(0, dims, 2) / dims)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "factors":
        inverse = inverse / np.array(rope.factors)
    elif rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = (rope.original_context * inverse / (2 * math.pi) - low) / (high - low)
        inverse = _between(inverse / rope.factor, inverse, kept)
    elif rope.kind == "yarn":
        first, last = (
            dims * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        stretched = (np.arange(dims // 2, dtype=np.float64) - first) / (last - first or 0.001)
        inverse = _between(inverse, inverse / rope.factor, stretched)
    return inverse.astype(np.float32)


def _between(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], at: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    at = np.clip(at, 0.0, 1.0)
    return a * (1 - at) + b * at


def angles(rope: Rope, head_dim: int, context: int) -> Floats:
    """Cosines and sines, shape [2, context, rotated dimensions / 2]."""
    turns = np.outer(np.arange(context, dtype=np.float32), frequencies(rope, head_dim))
    return np.ascontiguousarray(np.stack([np.cos(turns), np.sin(turns)]) * np.float32(rope.scale), dtype=np.float32)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
