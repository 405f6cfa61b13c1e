"""A process of its own for each processor, so that its arithmetic library has one thread: `python -m
octavo.plugins.roofline.probe` prints how many operations and bytes a second this one did.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

SIDE = 384
"""Of the matrices: they stay in the cache, and a product is short enough to find a moment without interruption."""
STREAM_BYTES = 64 * 2**20
"""More than the processor's share of any cache."""
LEAST_S = 1.0


class Rates(msgspec.Struct, frozen=True):
    """A second."""

    flops: float
    bytes: float


def main() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.random((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    data = np.ones(STREAM_BYTES // 8)
    product_s, read_s = _best(lambda: np.matmul(a, b, out=out)), _best(data.sum)
    rates = Rates(2 * SIDE**3 / product_s, STREAM_BYTES / read_s)
    print(msgspec.json.encode(rates).decode())


def _best(work: Callable[[], object]) -> float:
    """Seconds of the shortest run: nothing but what else the machine does makes one longer."""
    best, began = float("inf"), time.perf_counter()
    while (before := time.perf_counter()) < began + LEAST_S:
        work()
        best = min(best, time.perf_counter() - before)
    return best


if __name__ == "__main__":
    main()
