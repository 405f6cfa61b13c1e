"""Runs any pure core in a process: frames become `apply`, its outputs become frames, trace lines and wake-ups.

Serves the scheduler, the KV-manager and the tokenizer. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from octavo.core.config.schema import Config
from octavo.core.control import Ready, Topology
from octavo.core.machine import Core, Outbound
from octavo.core.messages import Body, Facts, PeerDown, PeerUp, Role, Tick, encode
from octavo.core.shell import Shell
from octavo.core.station import Arrival

C = TypeVar("C", bound=Core)


class CoreActor(Shell, Generic[C]):
    """Makes its core by `make(facts, generation)` as soon as there are facts, and anew for a new generation.

    `stats` reads the core's numbers for heartbeats."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        role: Role,
        generation: int,
        *,
        make: Callable[[Facts, int], C],
        stats: Callable[[C], dict[str, int]],
    ) -> None:
        super().__init__(config, run_dir, role, generation)
        self._make = make
        self._read = stats
        self._core: C | None = None

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
            self._core = self._make(topology.facts, self.station.links.generation)
            self.link.send(Ready())

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

    def _apply(self, core: C, message: Body, arrival: Arrival | None = None) -> None:
        outputs = core.apply(time.monotonic_ns(), message)
        self.wakeup_ns = outputs.wakeup_ns
        for outbound in outputs.messages:
            self.station.send(outbound.role, *self.beside(outbound, arrival), name=outbound.name)
        for event in outputs.events:
            self.events.emit(event)
