"""Who was served least goes first: the virtual token counter over tenants (VTC, Sheng et al., OSDI 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Ints, Mask, Observed, PolicyOptions, Running, Selection, Step, Waiting

Weight = Annotated[float, msgspec.Meta(gt=0)]


class Fair:
    """A counter per tenant grows with the tokens it got, prompt and output, over its weight. The tenant with the
    least is admitted next. Who comes back from having nothing to do starts level with those who have, so that nobody
    saves up service.

    Prompts being computed count before they are done: their rest is added from the view. With `takeover`, the tenant
    whose turn it is takes a slot from those with more for their weight."""

    class Options(PolicyOptions, frozen=True):
        output_cost: Annotated[float, msgspec.Meta(ge=0)] = 2.0
        """What one output token counts, in prompt tokens."""
        weights: dict[str, Weight] = msgspec.field(default_factory=dict)
        """Shares by tenant name; who is not named has weight 1. Taken from `policies.weights` unless given here."""
        takeover: bool = False
        """Whether slots are taken; else a tenant waits until one is left."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._shares: Mapping[str, float] = options.weights
        self._names: list[str] = []
        """Of the tenants that have a counter."""
        self._served: Floats = np.zeros(0)
        """The counter of each tenant."""
        self._weight: Floats = np.zeros(0)
        self._busy: Mask = np.zeros(0, dtype=np.bool_)
        """Who had something waiting or running when last asked."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        self._meet(step.tenants, waiting, running)
        rest = np.where(running.decoding, 0, running.known - running.planned)
        counter = self._served + np.bincount(running.tenant, rest, len(self._served)) / self._weight
        slots = np.bincount(running.tenant, minlength=len(self._served)).astype(np.int32)
        admit = self._order(counter, slots, waiting)
        if self._options.takeover and not step.free_slots and len(admit):
            return Selection(admit, preempt=self._takeover(counter, slots, int(waiting.tenant[admit[0]]), running))
        return Selection(admit)

    def observe(self, observed: Observed) -> None:
        got = observed.tenant_prefill + self._options.output_cost * observed.tenant_output
        known = min(len(got), len(self._served))
        self._served[:known] += got[:known] / self._weight[:known]

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._shares = {**weights, **self._options.weights}
        self._weight = np.asarray([self._shares.get(name, 1.0) for name in self._names], dtype=np.float64)

    def _meet(self, names: tuple[str, ...], waiting: Waiting, running: Running) -> None:
        """New tenants get a counter; those who come back are lifted to the least of the busy ones."""
        count = 1 + max([len(names) - 1, *waiting.tenant.tolist(), *running.tenant.tolist()])
        new = count - len(self._served)
        if new > 0:
            names = names or ("",) * count
            self._names += names[-new:]
            weights = [self._shares.get(name, 1.0) for name in names[-new:]]
            self._served = np.append(self._served, np.zeros(new))
            self._weight = np.append(self._weight, weights)
            self._busy = np.append(self._busy, np.zeros(new, dtype=np.bool_))
        busy = np.bincount(np.append(waiting.tenant, running.tenant), minlength=len(self._served)) > 0
        back = busy & ~self._busy
        if back.any():
            # With nobody busy, the level is that of the last one who was: the highest.
            level = self._served[self._busy].min() if self._busy.any() else self._served.max()
            self._served[back] = np.maximum(self._served[back], level)
        self._busy = busy

    def _order(self, counter: Floats, slots: Ints, waiting: Waiting) -> Ints:
        """Always the tenant with the least (among equals, with the fewest slots), and its first one. Who is admitted
        counts at once: so each stands at its tenant's counter and the cost of those of its tenant before it."""
        cost = (waiting.known - waiting.cached) / self._weight[waiting.tenant]
        by_tenant = np.argsort(waiting.tenant, kind="stable")
        before = np.cumsum(cost[by_tenant]) - cost[by_tenant]
        first = np.searchsorted(waiting.tenant[by_tenant], waiting.tenant[by_tenant])
        place = np.empty(len(waiting))
        place[by_tenant] = before - before[first]
        return np.lexsort((slots[waiting.tenant], counter[waiting.tenant] + place)).astype(np.int32)

    def _takeover(self, counter: Floats, slots: Ints, taker: int, running: Running) -> Ints:
        """The latest ones of the tenants furthest ahead, of those that keep as many slots for their weight as the taker
        then has."""
        keeps = (slots - 1) / self._weight >= (slots[taker] + 1) / self._weight[taker]
        giving = np.lexsort((-running.arrival_ns, -counter[running.tenant])).astype(np.int32)
        gives: Ints = giving[keeps[running.tenant[giving]]]
        return gives
