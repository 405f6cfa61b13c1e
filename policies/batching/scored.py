"""A policy made of parts: filters say who may be admitted, weighted scores say in which order.

A part is a function `(step, waiting, running) -> column [waiting]`, found by name: filters (a mask) in the
entry-point group `octavo.batching.filter`, scores (floats, higher is sooner) in `octavo.batching.score`. Octavo's own
are in `parts`; any package may add more.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Mask, PolicyOptions, Running, Selection, Step, Waiting

FILTERS = "octavo.batching.filter"
SCORES = "octavo.batching.score"


class Scored:
    """Admits whom all filters let pass, by the weighted sum of scores."""

    class Options(PolicyOptions, frozen=True):
        filters: tuple[str, ...] = ()
        """Names of filters; all must let one pass."""
        scores: dict[str, float] = msgspec.field(default_factory=lambda: {"age": 1.0})
        """Weight by name of score; those of `parts` are near 0 to 1 each."""

    def __init__(self, options: Options) -> None:
        self._filters: list[Callable[[Step, Waiting, Running], Mask]] = [_part(FILTERS, f) for f in options.filters]
        self._scores: list[tuple[float, Callable[[Step, Waiting, Running], Floats]]] = [
            (weight, _part(SCORES, name)) for name, weight in options.scores.items()
        ]

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        may = np.ones(len(waiting), dtype=np.bool_)
        for passes in self._filters:
            may &= passes(step, waiting, running)
        score = np.zeros(len(waiting))
        for weight, value in self._scores:
            score += weight * value(step, waiting, running)
        order = np.argsort(-score, kind="stable")
        return Selection(order[may[order]].astype(np.int32))


def _part(group: str, name: str) -> Any:
    points = metadata.entry_points(group=group)
    if name not in points.names:
        raise ValueError(f"no {group} is called {name!r}; installed: {', '.join(sorted(points.names)) or 'none'}")
    return points[name].load()
