"""LoRA in the CPU executor: rows of a step get what their adapter adds to a product, and other rows nothing.

    y[rows of the adapter] += up · (down · x[those rows])

Rows of one adapter are computed together, at row counts that were found to agree bit for bit (see `linear`): so what
is added to a row does not depend on which others there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.executors.cpu.linear import Backend, Linear, RowCounts
from octavo.executors.loading.peft import Lora
from octavo.executors.residents import Span


class Low(NamedTuple):
    """One part of an adapter, for columns [start, stop) of a product."""

    start: int
    stop: int
    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True)
class Packed:
    """An adapter as linears. `rows` are the row counts at which all of them are exact; `nbytes` is what their numbers
    take."""

    lows: Mapping[str, tuple[Low, ...]]
    rows: RowCounts
    nbytes: int


class Adapted(NamedTuple):
    """Which rows of a step are one adapter's: `rows` [n], and `padded` the same up to an allowed count."""

    packed: Packed
    rows: Tensor
    padded: Tensor

    @classmethod
    def of(cls, packed: Packed, rows: Tensor) -> Adapted:
        missing = packed.rows.padded(len(rows)) - len(rows)
        return cls(packed, rows, torch.cat((rows, rows[-1:].expand(missing))))

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        """To `y`, what the product `name` of x gets more."""
        if not (lows := self.packed.lows.get(name)):
            return
        counts, mine = self.packed.rows, x[self.padded]
        for low in lows:
            more = low.up(low.down(mine, counts), counts)
            y[:, low.start : low.stop].index_add_(0, self.rows, more[: len(self.rows)])


def linears(lora: Lora, backend: Backend) -> dict[str, tuple[Low, ...]]:
    def low(start: int, down: Tensor, up: Tensor) -> Low:
        return Low(start, start + len(up), Linear(down, None, backend), Linear(up, None, backend))

    return {
        name: tuple(low(part.start, torch.from_numpy(part.down), torch.from_numpy(part.up)) for part in parts)
        for name, parts in lora.parts.items()
    }


def rows_by_adapter(spans: list[Span]) -> Iterator[tuple[Span, Tensor]]:
    """For each adapter of a step, a span that has it, and all the rows of those that do."""
    spans_of: dict[bytes, list[tuple[int, Span]]] = {}
    at = 0
    for span in spans:
        if span.adapter is not None:
            spans_of.setdefault(span.adapter.digest, []).append((at, span))
        at += len(span.ids)
    for mine in spans_of.values():
        yield mine[0][1], torch.cat([torch.arange(start, start + len(span.ids)) for start, span in mine])
