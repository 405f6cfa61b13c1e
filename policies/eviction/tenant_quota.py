"""Nobody is pushed out of its share of the cache by another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Leaves, PolicyOptions

Weight = Annotated[float, msgspec.Meta(gt=0)]


class TenantQuota:
    """The cache is shared by weight among the tenants that have something in it. Who holds more than its share loses
    the excess first, least recently used first; then everyone loses by least recent use. An empty share is lent out
    until its owner needs it."""

    class Options(PolicyOptions, frozen=True):
        weights: dict[str, Weight] = msgspec.field(default_factory=dict)
        """Shares by tenant name; who is not named has weight 1. Taken from `policies.weights` unless given here."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._weights: Mapping[str, float] = options.weights

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._weights = {**weights, **self._options.weights}

    def rank(self, need: int, leaves: Leaves) -> Floats:
        score = leaves.last_used.astype(np.float64)
        weight = np.ones(len(leaves.held))
        for tenant, name in enumerate(leaves.tenants[: len(weight)]):
            weight[tenant] = self._weights.get(name, 1.0)
        weight[leaves.held == 0] = 0.0
        share = leaves.held.sum() * weight / (weight.sum() or 1.0)
        excess = leaves.held - np.floor(share).astype(np.int64)
        for tenant in np.flatnonzero(excess > 0).tolist():
            own = np.flatnonzero(leaves.tenant == tenant)
            oldest = own[np.argsort(leaves.last_used[own], kind="stable")]
            score[oldest[: excess[tenant]]] -= 2.0**52
        return score
