"""Linear layers that give a row the same bits whatever rows are computed with it.

A matrix product picks its blocking, and so its order of summation, by the number of rows. So only row counts that
were found to agree bit for bit on this machine are ever used (see `probe`): inputs are padded up to one, and long
ones cut into pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor


class Backend(Enum):
    """Who multiplies: oneDNN on weights packed for it (fast, and mostly the same at any row count), or torch's own."""

    PACKED = "packed"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Row counts that may be used, ascending: they give equal bits."""

    counts: tuple[int, ...]

    def padded(self, rows: int) -> int:
        """The least number of rows, not below `rows`, that can be cut into allowed counts."""
        most = self.counts[-1]
        whole, rest = divmod(rows, most)
        return whole * most + (self.counts[bisect_left(self.counts, rest)] if rest else 0)


class Linear:
    """y = x Wᵀ + b for x of a padded number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, backend: Backend) -> None:
        self._bias = bias
        self._packed = backend is Backend.PACKED
        self._outputs = weight.shape[0]
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs]."""
        return self._weight.to_dense() if self._packed else self._weight

    def product(self, x: Tensor) -> Tensor:
        """The bare product at exactly x's row count."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)

    def __call__(self, x: Tensor, rows: RowCounts) -> Tensor:
        """`x` has `rows.padded(n)` rows for some n."""
        if len(x) <= (most := rows.counts[-1]):
            return self.product(x)
        y = x.new_empty(len(x), self._outputs)
        for at in range(0, len(x), most):
            y[at : at + most] = self.product(x[at : at + most])
        return y
