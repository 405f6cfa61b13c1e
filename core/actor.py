"""Runs any pure core in a process: frames become `apply`, its outputs become frames, trace lines and wake-ups.

Serves the scheduler, the KV-manager and the tokenizer. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from octavo.core.config.schema import Config
from octavo.core.control import Ready, SetPolicy, SetShadow, SetWeights, Topology
from octavo.core.machine import Core, Outbound, Outputs
from octavo.core.messages import Body, Facts, PeerDown, PeerUp, Role, SwapPolicy, Tick, Weigh, encode
from octavo.core.pages import settle
from octavo.core.policy.tap import ProcessWatch
from octavo.core.shell import Shell
from octavo.core.station import Arrival
from octavo.core.trace.record import Recorder

C = TypeVar("C", bound=Core)


class CoreActor(Shell, Generic[C]):
    """Makes its core by `make(facts, generation, clock)` as soon as there are facts, and anew for a new generation;
    `clock` is for measuring how long something took, in ns.

    `stats` reads the core's numbers for heartbeats; `watch` looks on while it asks policies, if it does."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        role: Role,
        generation: int,
        *,
        make: Callable[[Facts, int, Callable[[], int]], C],
        stats: Callable[[C], dict[str, int]],
        watch: ProcessWatch | None = None,
    ) -> None:
        super().__init__(config, run_dir, role, generation)
        self._make = make
        self._read = stats
        self._onlooker = watch
        self._core: C | None = None
        self._policies: dict[str, SwapPolicy] = {}
        """What was set since the start, by group: for the cores of later generations."""
        self._weights: Weigh | None = None
        """The same of tenants' shares."""
        self._recorder = (
            Recorder(run_dir, role, self.events, config.trace.record_bytes)
            if config.trace.record and role in (Role.SCHEDULER, Role.KV)
            else None
        )

    def run(self) -> None:
        super().run()
        if self._recorder is not None:
            self._recorder.close()

    def can_start(self, topology: Topology) -> bool:
        """Whether what the core needs is there, beside facts."""
        return True

    def beside(self, outbound: Outbound, arrival: Arrival | None) -> list[bytes]:
        """The frames of an outgoing message, given the message (if any) that caused it."""
        return [encode(outbound.message)]

    def lose(self) -> None:
        self._core = None
        self.wakeup_ns = None

    def learn(self, topology: Topology) -> None:
        if self._core is None and topology.facts is not None and self.can_start(topology):
            clock = time.perf_counter_ns if self._recorder is None else self._recorder.clock
            self._core = self._make(topology.facts, self.station.links.generation, clock)
            if self._recorder is not None:
                self._recorder.started(self.station.links.generation, topology.facts)
            for policy in self._policies.values():
                self._apply(self._core, policy)
            if self._weights is not None:
                self._apply(self._core, self._weights)
            settle()
            self.link.send(Ready())

    def set_policy(self, policy: SetPolicy) -> None:
        self._policies[policy.group] = SwapPolicy(policy.group, policy.name, policy.options, policy.disabled)
        if self._core is not None:
            self._apply(self._core, self._policies[policy.group])

    def set_weights(self, weights: SetWeights) -> None:
        self._weights = Weigh(weights.weights)
        if self._core is not None:
            self._apply(self._core, self._weights)

    def set_shadow(self, shadow: SetShadow) -> None:
        if self._onlooker is not None:
            (self._onlooker.open if shadow.name else self._onlooker.close)(shadow.group)

    def peer(self, news: PeerUp | PeerDown) -> None:
        if self._core is not None:  # else the links of a state that is lost already
            self._apply(self._core, news)

    def take(self, arrival: Arrival) -> None:
        if self._core is None:
            raise RuntimeError(
                f"{self.role.name} has no core, yet a frame from {arrival.header.source.name} was let in"
            )
        self._apply(self._core, arrival.body, arrival)

    def tick(self) -> None:
        self.wakeup_ns = None
        if self._core is not None:
            self._apply(self._core, Tick())

    def stats(self) -> dict[str, int]:
        return {} if self._core is None else self._read(self._core)

    def _apply(self, core: C, message: Body, arrival: Arrival | None = None) -> Outputs:
        now_ns = time.monotonic_ns()
        outputs = core.apply(now_ns, message)
        if self._recorder is not None:
            self._recorder.applied(now_ns, message, outputs)
        self.wakeup_ns = outputs.wakeup_ns
        for outbound in outputs.messages:
            self.station.send(outbound.role, *self.beside(outbound, arrival), name=outbound.name)
        for event in outputs.events:
            self.events.emit(event, now_ns)
        return outputs
