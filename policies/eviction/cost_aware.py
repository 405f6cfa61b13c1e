"""What is cheap to compute again and seldom found goes first."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Leaves, PolicyOptions


class CostAware:
    """Value of a block: its cost to compute again × how often it was found ÷ time since its last use (after
    GreedyDual-Size-Frequency, Cherkasova, 1998). A block deep in a prefix costs more, since its tokens attend to all
    before them."""

    class Options(PolicyOptions, frozen=True):
        attention: Annotated[float, msgspec.Meta(ge=0)] = 0.01
        """What each block before it adds to the cost of one, as a part of the cost of the first."""

    def __init__(self, options: Options) -> None:
        self._attention = options.attention

    def rank(self, need: int, leaves: Leaves) -> Floats:
        cost = 1.0 + self._attention * leaves.depth
        age_s = np.maximum(0, leaves.now_ns - leaves.last_used_ns) / 1e9
        return np.asarray(cost * (1.0 + leaves.hits) / (1.0 + age_s))
