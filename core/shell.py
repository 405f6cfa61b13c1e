"""The loop of an actor process on the step path: poll the mailbox and the control line, hand over what comes.

A plain blocking poll, because an event loop's wake-up costs as much as a hop between processes. Subclasses say
what a message means (`actor` for pure cores, the executor's own shell for executors). Whatever they raise ends
the process, and the supervisor starts another: nothing is caught here.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import zmq

from octavo.core.config.schema import Config
from octavo.core.control import (
    Adapters,
    AskCache,
    Hello,
    Progress,
    ReadAdapter,
    SetPolicy,
    SetShadow,
    SetWeights,
    Shutdown,
    ToMember,
    Topology,
    TopologyAck,
)
from octavo.core.control_link import ControlLink
from octavo.core.messages import PeerDown, PeerUp, Role
from octavo.core.pages import settle
from octavo.core.station import Arrival, Station
from octavo.core.trace.catalogue import TraceOpened
from octavo.core.trace.emit import Emitter

STATS_MS = 200
"""How old the numbers of a heartbeat may be."""


class Shell:
    """One actor's process. `events`, `station` and `link` are for subclasses to use."""

    wakeup_ns: int | None = None
    """`tick` is called at this monotonic time unless it is changed before."""

    def __init__(self, config: Config, run_dir: Path, role: Role, generation: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.role = role
        self.events = Emitter(run_dir, role, config.trace, generation=generation)
        self.events.emit(TraceOpened(pid=os.getpid(), wall_ns=time.time_ns()))
        self.station = Station(context, run_dir, role, self.events.emit, generation=generation)
        hello = Hello(role=role, name=role.name.lower(), pid=os.getpid(), generation=generation)
        self.link = ControlLink(context, run_dir, hello)
        self._poller = self._watch()
        self._handled = 0
        self._busy_ns: int | None = None
        self._stats: dict[str, int] = {}
        self._stats_ns = 0
        """When they were last read."""
        self.link.progress = self._progress

    # ── what a subclass says ─────────────────────────────────────────────────────────────────────

    def lose(self) -> None:
        """The own state has a new generation: forget everything."""

    def learn(self, topology: Topology) -> None:
        """A topology came; it is acknowledged when this returns."""

    def set_policy(self, policy: SetPolicy) -> None:
        """Another policy was chosen while the service runs."""

    def set_shadow(self, shadow: SetShadow) -> None:
        """A policy of somebody's begins or ends to look at copies of what ours are asked."""

    def set_weights(self, weights: SetWeights) -> None:
        """Tenants have these shares."""

    def ask_cache(self, asked: AskCache) -> None:
        """To the KV-manager."""

    def set_adapters(self, message: Adapters | ReadAdapter) -> None:
        """Which adapters have a name, or one that is to be read."""

    def peer(self, news: PeerUp | PeerDown) -> None:
        """A link went up or down."""

    def take(self, arrival: Arrival) -> None:
        """A message came."""

    def tick(self) -> None:
        """The time `wakeup_ns` has come."""

    def stats(self) -> dict[str, int]:
        """Small numbers for heartbeats; read some times a second, and once after the last message."""
        return {}

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Until the supervisor says `Shutdown`."""
        settle()
        with self.events, self.link:
            open_ = True
            while open_:
                ready = self._rest()
                if self.link.socket in ready:
                    open_ = self._control()
                if open_:
                    self._work(self.station.waiting or self.station.mailbox.socket in ready)
            self.station.close()

    def _control(self) -> bool:
        while (message := self.link.receive()) is not None:
            if isinstance(message, Shutdown):
                return False
            self._hear(message)
        return True

    def _hear(self, message: ToMember) -> None:
        self._busy()
        before = self.station.links.generation
        news = self.station.control(message)
        if self.station.links.generation != before:
            self.events.generation = self.station.links.generation
            self._poller = self._watch()
            self.lose()
        for peer in news:
            self.peer(peer)
        match message:
            case SetPolicy():
                self.set_policy(message)
            case SetShadow():
                self.set_shadow(message)
            case SetWeights():
                self.set_weights(message)
            case AskCache():
                self.ask_cache(message)
            case Adapters() | ReadAdapter():
                self.set_adapters(message)
            case Topology():
                self.learn(message)
                self.link.send(TopologyAck(message.epoch))
        self._stats_ns = 0  # there may be a core now, or none, or another policy

    def _work(self, mail: bool) -> None:
        """One message: the next poll tells whether there are more, for less than a receive that finds nothing."""
        if mail and (arrival := self.station.receive()) is not None:
            self._busy()
            for peer in arrival.news:
                self.peer(peer)
            self.take(arrival)
        if self.wakeup_ns is not None and time.monotonic_ns() >= self.wakeup_ns:
            self._busy()
            self.tick()

    def _busy(self) -> None:
        self._handled += 1
        self._busy_ns = now_ns = time.monotonic_ns()
        if now_ns - self._stats_ns > STATS_MS * 1_000_000:
            self._stats, self._stats_ns = self.stats(), now_ns

    def _progress(self) -> Progress:
        """For the thread of heartbeats, whenever it sends one."""
        return Progress(counter=self._handled, busy_since_ns=self._busy_ns, stats=self._stats)

    def _rest(self) -> list[zmq.Socket[bytes]]:
        """Wait until there is something to do: the sockets that can be read."""
        if self.station.full:
            for full in self.station.full:
                self.link.send(full)
            self.station.full.clear()
        self._busy_ns = None
        if self.station.waiting:
            return self._poll(0)
        now_ns = time.monotonic_ns()
        timeout_ms = None
        if self.wakeup_ns is not None:
            timeout_ms = max(0, -(-(self.wakeup_ns - now_ns) // 1_000_000))
        due = now_ns - self._stats_ns > STATS_MS * 1_000_000
        if not due:  # between the messages of a step nobody has time for numbers
            short_ms = STATS_MS if timeout_ms is None else min(timeout_ms, STATS_MS)
            ready = self._poll(short_ms)
            if ready or short_ms == timeout_ms:
                return ready
            timeout_ms = None if timeout_ms is None else timeout_ms - short_ms
        self._stats, self._stats_ns = self.stats(), now_ns
        return self._poll(timeout_ms)

    def _poll(self, timeout_ms: int | None) -> list[zmq.Socket[bytes]]:
        return [socket for socket, _ in self._poller.poll(timeout_ms)]

    def _watch(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self.station.mailbox.socket, zmq.POLLIN)
        poller.register(self.link.socket, zmq.POLLIN)
        return poller
