"""LoRA on a device: rows of a pass get what their adapter adds to a product, other rows nothing.

    y[rows of the adapter] += up · (down · x[those rows])

Linears as the model's own (see `linear`), so in exact mode a row's numbers are its own here too. Which rows are whose
differs from step to step, so steps with adapters are launched, never recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.core.models.errors import ModelError
from octavo.executors.cuda.linear import Linear
from octavo.executors.loading.peft import Lora

RANK = 64
"""Of the adapter that is measured with: what goes through it is small beside a product's columns."""


class Low(NamedTuple):
    """One part of an adapter, for columns [start, stop) of a product."""

    start: int
    stop: int
    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """An adapter on the device; `nbytes` is what its numbers take there."""

    lows: Mapping[str, tuple[Low, ...]]
    nbytes: int


def packed(lora: Lora, device: torch.device, dtype: torch.dtype, *, exact: bool) -> Packed:
    """Raises `ModelError` when the device has no room, or `dtype` none for its numbers."""

    def linear(matrix: Tensor) -> Linear:
        moved = matrix.to(device=device, dtype=dtype).contiguous()
        if not bool(moved.isfinite().all()):
            raise ModelError(f"numbers of the adapter are beyond {dtype}'s")
        return Linear(moved, None, exact)

    try:
        lows = {
            name: tuple(
                Low(
                    part.start,
                    part.start + len(part.up),
                    linear(torch.from_numpy(part.down)),
                    linear(torch.from_numpy(part.up)),
                )
                for part in parts
            )
            for name, parts in lora.parts.items()
        }
    except torch.OutOfMemoryError:
        raise ModelError("the GPU has no room for the adapter beside the KV pool; set kv.tokens, or lower it") from None
    return Packed(lows, size_of(lora, dtype))


def size_of(lora: Lora, dtype: torch.dtype) -> int:
    """Bytes that it takes on the device."""
    return dtype.itemsize * sum(part.down.size + part.up.size for parts in lora.parts.values() for part in parts)


def widest(products: Sequence[Adaptable]) -> Packed:
    """One that adds to all of these products, to measure what a step with adapters takes: one for all of its tokens
    takes the most. Of zeros, and alike products share theirs."""
    each: dict[torch.Size, Low] = {}
    for product in products:
        weight, exact = product.linear.weight, product.linear.exact
        if weight.shape not in each:
            rows, cols = weight.shape
            down, up = weight.new_zeros(RANK, cols), weight.new_zeros(rows, RANK)
            each[weight.shape] = Low(0, rows, Linear(down, None, exact), Linear(up, None, exact))
    return Packed({product.name: (each[product.linear.weight.shape],) for product in products}, 0)


class Adapted(NamedTuple):
    """`rows` [n] int64 of a pass are the adapter's, each once."""

    packed: Packed
    rows: Tensor


class Adapting:
    """Whose rows the pass that is being launched has: linears of a model look here."""

    def __init__(self) -> None:
        self.now: Sequence[Adapted] = ()

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        """To `y`, what the product `name` of x gets more."""
        for packed, rows in self.now:
            if lows := packed.lows.get(name):
                mine = x[rows]
                for low in lows:
                    y[:, low.start : low.stop].index_add_(0, rows, low.up(low.down(mine)))


@dataclass(frozen=True, slots=True, eq=False)
class Adaptable:
    """A linear of the model that an adapter may add to, by its name."""

    linear: Linear
    name: str
    adapting: Adapting

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] to [n, out]."""
        y = self.linear(x)
        if self.adapting.now:
            self.adapting.add(self.name, x, y)
        return y
