"""The cached block that was found least often goes first."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Leaves, PolicyOptions


class Lfu:
    """Least frequently used, among equals least recently. What was not used for `ttl_s` counts as never found, so that
    yesterday's favourites do not stay for ever."""

    class Options(PolicyOptions, frozen=True):
        ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0

    def __init__(self, options: Options) -> None:
        self._ttl_ns = options.ttl_s * 1e9

    def rank(self, need: int, leaves: Leaves) -> Floats:
        fresh = leaves.now_ns - leaves.last_used_ns <= self._ttl_ns
        # Both fit a float exactly: last_used is below 2**40 for as long as anybody will wait.
        return np.where(fresh, np.minimum(leaves.hits, 4095), 0) * 2.0**40 + leaves.last_used
