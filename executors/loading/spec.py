"""What a decoder is made of: the numbers that its forward pass needs, free of any file format and of torch.

One `Spec` tells every family apart by facts, not by name: a program asks whether heads are normed, never whether
the model is a Qwen3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from octavo.core.models.errors import ModelError
from octavo.executors.loading.rope import Rope, frequencies

if TYPE_CHECKING:
    import torch

Weights: TypeAlias = "dict[str, torch.Tensor]"
"""fp32 tensors by our names: embed, norm, head (absent when tied), and per layer i, with optional `.bias` beside each
linear: i.qkv.weight [(Hq + 2 Hkv) d, hidden], i.o.weight, i.gate_up.weight [2 inner, hidden], i.down.weight,
i.attn_norm, i.mlp_norm. Heads are in Hugging Face's rotate-half order."""


MOST_LAYERS, MOST_HEADS, MOST_EXPERTS = 4096, 4096, 4096
"""More than any model has: names are made for each, so a number that is damaged must end before that."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's MLP is `count` small ones of width `inner`; a token goes through the `used` best. Their weights are
    the router's softmax over all, made to sum to 1 again if `normed`, times `scale`. With `groups` only experts of the
    `groups_used` best are looked at. With `sigmoid` weights are the sigmoids of the router's logits, and which are best
    is said by those with a correction added to each expert's; a group is as good as its best two. The first `dense`
    layers have an ordinary MLP. Beside them every token goes through one of width `shared`, if that is not 0."""

    count: int
    used: int
    inner: int
    normed: bool
    scale: float = 1.0
    groups: int = 0
    groups_used: int = 0
    dense: int = 0
    shared: int = 0
    sigmoid: bool = False


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention over one vector a token, for all heads: `rank` numbers that keys and values are made of, and a key of
    `rotated` numbers. A head's query has `kept` numbers that do not rotate before those that do, and mixes `values`
    numbers. Queries go through `query_rank` numbers first, if that is not 0."""

    rank: int
    rotated: int
    kept: int
    values: int
    query_rank: int = 0


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
    local_rope: Rope | None = None
    rotations: tuple[int, ...] = ()
    """By layer: 0 `rope`, 1 `local_rope`, -1 none. Empty: 0 everywhere."""
    windows: tuple[int, ...] = ()
    """By layer: positions that a token sees, its own included; 0 is all. Empty: all everywhere."""
    activation: str = "silu"
    """silu, gelu_tanh, gelu or relu."""
    gated: bool = True
    """The MLP multiplies its activation with a second projection."""
    layer_norm: bool = False
    """Norms subtract the mean and may have biases; else RMS."""
    head_norms: bool = False
    """Queries and keys are normed head by head before they are rotated."""
    post_norms: bool = False
    """What attention and MLP give is normed before it is added."""
    parallel: bool = False
    """Attention and MLP both read the layer's input."""
    learned_positions: bool = False
    embed_scale: float = 1.0
    score_scale: float = 0.0
    """Of queries; 0 is head_dim ** -0.5."""
    score_cap: float = 0.0
    logit_cap: float = 0.0
    """x becomes cap · tanh(x / cap); 0 leaves it."""
    slopes: tuple[float, ...] = ()
    """By head: what a score loses for each token from key to query (ALiBi). Empty: nothing."""
    embed_norm: bool = False
    """Embeddings are normed."""
    qkv_cap: float = 0.0
    """Queries, keys and values beyond it, or below its negative, become that; 0 leaves them."""
    experts: Experts | None = None
    latent: Latent | None = None
    """With it there is one key head, of `rank + rotated` numbers."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "inner", "context"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} is {getattr(self, name)}; it must be at least 1")
        if self.layers > MOST_LAYERS or (self.experts and self.experts.count > MOST_EXPERTS):
            most = f"{MOST_LAYERS} layers of {MOST_EXPERTS} experts are the most that can be read"
            raise ModelError(
                f"the model has {self.layers} layers of {self.experts.count if self.experts else 1}; {most}"
            )
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        for rope in self.ropes:
            rotated = rope.dims or self.head_dim
            if rotated % 2 or rotated > self.head_dim:
                raise ModelError(f"{rotated} of {self.head_dim} dimensions of a head cannot be rotated in pairs")
            if rope.factors and len(rope.factors) != rotated // 2:
                raise ModelError(f"{len(rope.factors)} rope factors for {rotated // 2} frequencies")
            if not _turns(rope, self.head_dim):
                raise ModelError(f"no text can be rotated by {rope.kind}, base {rope.theta}, factor {rope.factor}")
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise ModelError(f"the model's norms add {self.norm_eps}; it must be a small number")
        if self.experts and not 1 <= self.experts.used <= self.experts.count:
            raise ModelError(f"a token cannot go through {self.experts.used} of {self.experts.count} experts")
        if (experts := self.experts) and experts.groups:
            if experts.count % experts.groups or not 1 <= experts.groups_used <= experts.groups <= 64:
                raise ModelError(
                    f"{experts.groups_used} of {experts.groups} groups of {experts.count} experts cannot be"
                )
            if experts.sigmoid and experts.count // experts.groups < 2:
                raise ModelError(f"groups of one expert do not have the best two: {experts.groups} of {experts.count}")
            if experts.used > experts.groups_used * (experts.count // experts.groups):
                raise ModelError(f"{experts.groups_used} groups of experts do not have {experts.used}")
        if (latent := self.latent) and min(latent.rank, latent.rotated, latent.kept, latent.values) < 1:
            raise ModelError(f"latent attention with sizes below 1 cannot be: {latent}")
        if (latent := self.latent) and (self.kv_heads, self.head_dim) != (1, latent.rank + latent.rotated):
            raise ModelError(f"latents of {latent.rank} + {latent.rotated} numbers, but a key head of {self.head_dim}")
        if self.qkv_cap and not self.qkv_cap > 0:
            raise ModelError(f"queries, keys and values cannot be kept within {self.qkv_cap}")
        if len(self.slopes) not in (0, self.heads) or not all(map(math.isfinite, self.slopes)):
            raise ModelError(f"{len(self.slopes)} slopes, each a number, are not for {self.heads} heads")
        for name in ("rotations", "windows"):
            if (given := len(getattr(self, name))) not in (0, self.layers):
                raise ModelError(f"{name} are given for {given} of {self.layers} layers")

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def is_mixture(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rotation(self, layer: int) -> int:
        return self.rotations[layer] if self.rotations else 0

    def beyond_cpu(self) -> str | None:
        """What of this model the torch executors do not have, in a few words."""
        if any(0 < window < self.context for window in self.windows):
            return "sliding-window attention"
        for there, what in (
            (self.latent, "latent attention (MLA)"),
            (self.experts, "a mixture of experts"),
            (self.head_norms, "normed queries and keys"),
            (self.post_norms, "norms after attention and MLP"),
            (self.score_cap or self.logit_cap, "soft caps"),
            (self.local_rope is not None, "layers that rotate differently"),
            (self.rope.scale != 1, f"{self.rope.kind} rotary embedding with scaled angles"),
        ):
            if there:
                return what
        return None

    def beyond_cuda(self) -> str | None:
        """What of this model the CUDA executor does not have, in a few words."""
        widths = [self.hidden]
        if not all(self.is_mixture(i) for i in range(self.layers)):
            widths.append(self.inner)
        if self.experts is not None:
            widths += [self.experts.inner, self.experts.shared]
        if odd := [width for width in widths if width % 8]:
            return f"widths that are no multiples of 8, as {odd[0]}"
        if self.latent is not None:
            if self.latent.rank % 64 or self.latent.rotated % 16 or self.latent.query_rank % 8:
                return f"latents of {self.latent.rank} + {self.latent.rotated}, only of multiples of 64 and of 16"
            return None
        if self.head_dim % 16 or self.head_dim > 256:
            return f"heads of {self.head_dim}, only of multiples of 16 up to 256"
        return None


def _turns(rope: Rope, head_dim: int) -> bool:
    """Whether its angles are numbers."""
    try:
        with np.errstate(all="ignore"):
            return bool(np.isfinite(frequencies(rope, head_dim)).all()) and math.isfinite(rope.scale)
    except (ValueError, ArithmeticError):
        return False


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama-family model's numbers and weights. `digest` names its files' content."""

    spec: Spec
    weights: Weights
    digest: bytes


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, fp32, shape [rotated dimensions / 2]."""
    import torch

    return torch.from_numpy(frequencies(rope, head_dim))
