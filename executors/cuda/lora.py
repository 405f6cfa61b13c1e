"""LoRA on a device: rows of a pass get what their adapter adds to a product, other rows nothing.

    y[rows of the adapter] += up · (down · x[those rows])

Linears as the model's own (see `linear`), so in exact mode a row's numbers are its own here too.

Which rows are whose differs from step to step. A step that is launched takes each adapter's rows; in one that is
recorded whose a row is is a number in a buffer. All adapters that are held lie side by side there as one, of which a
row keeps what its own makes of it. That cuts sums by all that are held, so in exact mode each computes all rows by
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.models.errors import ModelError
from octavo.executors.cuda.linear import Linear
from octavo.executors.loading.peft import Lora

APART = 8
"""Adapters that may be held where exact steps with some are recorded: of many, those of a step alone take less time."""
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


def packed(lora: Lora, device: torch.device, dtype: torch.dtype, nbytes: int, *, exact: bool) -> Packed:
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
    return Packed(lows, nbytes)


def size_of(lora: Lora, dtype: torch.dtype, widths: Mapping[str, int]) -> int:
    """Bytes that it takes on the device. Where steps are recorded, `widths` are rows of the products by name: there it
    lies `Together` with others once more."""
    numbers = 0
    for name, parts in lora.parts.items():
        numbers += sum(part.down.size + part.up.size for part in parts)
        numbers += widths.get(name, 0) and sum(part.down.size + widths[name] * len(part.down) for part in parts)
    return dtype.itemsize * numbers


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


class Adds(Protocol):
    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        """To `y`, what the product `name` of x gets more."""
        ...


class Adapted(NamedTuple):
    """`rows` [n] int64 of a pass are the adapter's, each once."""

    packed: Packed
    rows: Tensor

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        if lows := self.packed.lows.get(name):
            mine = x[self.rows]
            for low in lows:
                y[:, low.start : low.stop].index_add_(0, self.rows, low.up(low.down(mine)))


class _Side(NamedTuple):
    """All parts for a product: `down` [ranks, in], `up` [out, ranks], and int32 `owner` [ranks], whose each is."""

    down: Tensor
    up: Tensor
    owner: Tensor


class Together:
    """Adapters side by side, by digest at their `places`."""

    def __init__(self, held: Mapping[bytes, Packed], products: Sequence[Adaptable]) -> None:
        self.places = {digest: place for place, digest in enumerate(held)}
        self.sides: dict[str, _Side] = {}
        for product in products:
            weight = product.linear.weight
            each = [(place, low) for place, one in enumerate(held.values()) for low in one.lows.get(product.name, ())]
            if not each:
                continue
            ranks = [len(low.down.weight) for _, low in each]
            up = weight.new_zeros(len(weight), sum(ranks))
            for (_, low), columns in zip(each, torch.split(up, ranks, dim=1), strict=True):
                columns[low.start : low.stop] = low.up.weight
            owners = [place for (place, _), rank in zip(each, ranks, strict=True) for _ in range(rank)]
            owner = torch.tensor(owners, dtype=torch.int32, device=weight.device)
            self.sides[product.name] = _Side(torch.cat([low.down.weight for _, low in each]), up, owner)

    def add(self, owners: Tensor, name: str, x: Tensor, y: Tensor) -> None:
        if (side := self.sides.get(name)) is not None:
            low = F.linear(x, side.down)
            y.addmm_(torch.where(owners.unsqueeze(1) == side.owner, low, 0.0), side.up.T)


class Apart:
    """Adapters each by itself, at their `places`: a row gets the very numbers that it gets where its step is launched,
    whoever else is held."""

    def __init__(self, held: Mapping[bytes, Packed]) -> None:
        self.places = {digest: place for place, digest in enumerate(held)}
        self._held = list(held.values())

    def add(self, owners: Tensor, name: str, x: Tensor, y: Tensor) -> None:
        for place, packed in enumerate(self._held):
            for low in packed.lows.get(name, ()):
                part, more = y[:, low.start : low.stop], low.up(low.down(x))
                torch.where(owners.unsqueeze(1) == place, more.add_(part), part, out=part)


Held: TypeAlias = Together | Apart
"""What a recorded step has of adapters."""


class Owned(NamedTuple):
    """`owners` int32 [n]: the place of each row's adapter, below 0 for none."""

    held: Held
    owners: Tensor

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        self.held.add(self.owners, name, x, y)


class Adapting:
    """Whose rows the pass that is being launched has: linears of a model look here."""

    def __init__(self) -> None:
        self.now: Sequence[Adds] = ()

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        for one in self.now:
            one.add(name, x, y)


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
