"""The one with the least work left goes first (shortest remaining processing time, without taking slots)."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Observed, PolicyOptions, Running, Selection, Step, Waiting


class Shortest:
    """Work is what is left to compute of the prompt, and the outputs to come at a decode's dearer price.

    How many outputs will come nobody knows; a client says at most how many. The estimate is that limit, but no more
    than answers of its tenant have been long lately (a moving mean)."""

    class Options(PolicyOptions, frozen=True):
        output_cost: Annotated[float, msgspec.Meta(ge=0)] = 4.0
        """What one output token costs, in prompt tokens."""
        ageing: Annotated[float, msgspec.Meta(ge=0)] = 100.0
        """Tokens of work forgiven for each second of waiting, so that long ones have their turn."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lengths: dict[int, float] = {}
        """Mean answer of a tenant, tokens."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        prefill = waiting.known - waiting.cached
        usual = np.asarray([2 * self._lengths.get(t, np.inf) for t in waiting.tenant.tolist()])
        work = prefill + self._options.output_cost * np.minimum(waiting.output_left, usual)
        waited_s = (step.now_ns - waiting.arrival_ns) / 1e9
        order = np.argsort(work - self._options.ageing * waited_s, kind="stable")
        return Selection(order.astype(np.int32), when_blocked="skip")

    def observe(self, observed: Observed) -> None:
        for tenant, output in zip(observed.tenant.tolist(), observed.output.tolist(), strict=True):
            mean = self._lengths.get(tenant, float(output))
            self._lengths[tenant] = mean + (output - mean) / 16
