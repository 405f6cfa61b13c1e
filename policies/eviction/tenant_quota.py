"""Nobody is pushed out of its share of the cache by another."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Floats, Leaves


class TenantQuota:
    """The cache is shared equally among the tenants that have something in it. Who holds more than its share loses
    the excess first, least recently used first; then everyone loses by least recent use. An empty share is lent out
    until its owner needs it."""

    def rank(self, need: int, leaves: Leaves) -> Floats:
        score = leaves.last_used.astype(np.float64)
        holders = max(1, int((leaves.held > 0).sum()))
        excess = leaves.held - leaves.held.sum() // holders
        for tenant in np.flatnonzero(excess > 0).tolist():
            own = np.flatnonzero(leaves.tenant == tenant)
            oldest = own[np.argsort(leaves.last_used[own], kind="stable")]
            score[oldest[: excess[tenant]]] -= 2.0**52
        return score
