"""What a Llama-family model is made of: the numbers that its forward pass needs, free of any file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.models.errors import ModelError

if TYPE_CHECKING:  # the native executor reads these numbers too, and starts in a third of the time without it
    import torch

Weights: TypeAlias = "dict[str, torch.Tensor]"
"""fp32 tensors by our names: embed, norm, head (absent when tied), and per layer i, with optional `.bias` beside each
linear: i.qkv.weight [(Hq + 2 Hkv) d, hidden], i.o.weight, i.gate_up.weight [2 inner, hidden], i.down.weight,
i.attn_norm, i.mlp_norm. Heads are in Hugging Face's rotate-half order."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `kind` is default, linear (positions divided by `factor`), llama3 (long wavelengths
    stretched by `factor`), or factors (each frequency divided by an own number that the file brings)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Spec:
    """Shapes and constants. `heads` query heads share `kv_heads` key and value heads."""

    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    norm_eps: float
    context: int
    rope: Rope

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "inner", "context"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        if self.rope.factors and len(self.rope.factors) != self.head_dim // 2:
            raise ModelError(f"{len(self.rope.factors)} rope factors for {self.head_dim // 2} frequencies")


@dataclass(frozen=True, slots=True)
class Model:
    """A model's numbers and weights. `digest` names its files' content."""

    spec: Spec
    weights: Weights
    digest: bytes


def check(spec: Spec, weights: Weights) -> None:
    """Raise `ModelError` unless every weight is there with the shape that `spec` says, and none is beside them."""
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    expected: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.hidden), "norm": (spec.hidden,)}
    optional: dict[str, tuple[int, ...]] = {"head.weight": (spec.vocab_size, spec.hidden)}
    for i in range(spec.layers):
        expected |= {f"{i}.attn_norm": (spec.hidden,), f"{i}.mlp_norm": (spec.hidden,)}
        for name, shape in {
            "qkv": (qkv, spec.hidden),
            "o": (spec.hidden, spec.heads * spec.head_dim),
            "gate_up": (2 * spec.inner, spec.hidden),
            "down": (spec.hidden, spec.inner),
        }.items():
            expected[f"{i}.{name}.weight"] = shape
            optional[f"{i}.{name}.bias"] = shape[:1]
    if missing := sorted(expected.keys() - weights.keys()):
        raise ModelError(f"{len(missing)} weights are missing, for example {missing[0]}")
    if unknown := sorted(weights.keys() - expected.keys() - optional.keys()):
        raise ModelError(
            f"{len(unknown)} weights have no place in a {spec.architecture} model, for example {unknown[0]}"
        )
    for name, tensor in weights.items():
        wanted = expected.get(name) or optional[name]
        if tuple(tensor.shape) != wanted:
            raise ModelError(f"weight {name} has shape {tuple(tensor.shape)}, {wanted} was expected")


def frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float32]:
    """Angle per position of each pair of dimensions, shape [head_dim / 2]."""
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    # Powers in double precision: the nearest fp32 number, whatever library computes it.
    inverse = np.float32(1) / np.power(float(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "linear":
        return np.asarray(inverse / np.float32(rope.factor))
    if rope.kind == "factors":
        return np.asarray(inverse / np.asarray(rope.factors, dtype=np.float32))
    if rope.kind == "llama3":
        wavelength = np.float32(2 * np.pi) / inverse
        low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
        smooth = ((np.float32(rope.original_context) / wavelength - low) / (high - low)).clip(0, 1)
        stretched = inverse / np.float32(rope.factor)
        return np.asarray(stretched + smooth * (inverse - stretched))
    return inverse


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """`frequencies` for torch."""
    import torch

    return torch.from_numpy(frequencies(rope, head_dim))
