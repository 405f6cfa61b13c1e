"""A model's linears on a device. torch (cuBLAS) multiplies; which of its kernels it takes depends on the number of
rows, and with it the order of sums: so by default a row's result depends on how many others there are.

Exact linears multiply 64 rows at a time, padded: then every product of a layer has one shape and gets one kernel, and a
row's result should depend on that row alone. cuBLAS does not promise it: the tests for a GPU look.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    weight: Tensor
    bias: Tensor | None
    exact: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] to [n, out]."""
        if not self.exact:
            return F.linear(x, self.weight, self.bias)
        n = len(x)
        padded = F.pad(x, (0, 0, 0, -n % ROWS))
        return torch.cat([F.linear(tile, self.weight, self.bias) for tile in torch.split(padded, ROWS)])[:n]
