"""Segmented LRU: what was never found again goes before what was, so that a scan cannot wash the cache out."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Leaves, PolicyOptions


class Slru:
    """Blocks found at least once are protected, by turns of least recent use (Karedla et al., 1994). Protection ends
    after `ttl_s` without use, and for the least recent ones when more than `share` of the leaves have it."""

    class Options(PolicyOptions, frozen=True):
        share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
        ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0

    def __init__(self, options: Options) -> None:
        self._share = options.share
        self._ttl_ns = options.ttl_s * 1e9

    def rank(self, need: int, leaves: Leaves) -> Floats:
        protected = (leaves.hits > 0) & (leaves.now_ns - leaves.last_used_ns <= self._ttl_ns)
        most = int(np.ceil(self._share * len(leaves)))
        if int(protected.sum()) > most:
            protected &= leaves.last_used >= np.sort(leaves.last_used[protected])[-most]
        return leaves.last_used + protected * 2.0**52
