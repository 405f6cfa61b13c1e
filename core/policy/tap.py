"""An actor's side of shadows: copies of its policies' calls go to whoever runs another policy beside them.

The way there is short and bounded. What does not fit, because the shadow is behind, hangs or is dead, is dropped at
once: the step never waits, and the numbers of the copies show what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from octavo.core import wire
from octavo.core.messages import Role
from octavo.core.policy import copies
from octavo.core.policy.watch import AskedFile
from octavo.policies.contract import Observed

QUEUE = 64
"""Copies that may be on their way, at each end."""


class Tap:
    """To the shadow of one group."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 0
        self._socket.sndhwm = QUEUE
        self._socket.immediate = True  # no queue for one who is not there
        self._socket.connect(endpoint)
        self.number = 0

    def offer(self, frame: Callable[[], bytes]) -> None:
        """Made only if there is room for it."""
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
            with suppress(zmq.Again):  # the room is gone meanwhile; the other end misses a number
                self._socket.send(frame(), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class ProcessWatch(AskedFile):
    """What looks on in an actor's process: its file for the supervisor, and the taps that are open."""

    def __init__(self, run_dir: Path, role: Role) -> None:
        super().__init__(run_dir, role)
        self._run_dir = run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._names: dict[str, str] = {}
        self._taps: dict[str, Tap] = {}

    def open(self, group: str) -> None:
        """From now on; a tap that was open begins anew."""
        self.close(group)
        self._taps[group] = Tap(self._context, wire.shadow_endpoint(self._run_dir, group))
        self.observing = True

    def close(self, group: str) -> None:
        if (tap := self._taps.pop(group, None)) is not None:
            tap.close()
        self.observing = bool(self._taps)

    def named(self, names: Mapping[str, str]) -> None:
        super().named(names)
        self._names = dict(names)

    def answered(self, group: str, arguments: tuple[Any, ...], answer: Any, spent_ns: int) -> None:
        if (tap := self._taps.get(group)) is not None:
            tap.number += 1
            number, name = tap.number, self._names[group]
            tap.offer(lambda: copies.call(group, number, name, spent_ns, arguments, answer))

    def observed(self, observed: Observed) -> None:
        for tap in self._taps.values():
            tap.offer(lambda: copies.told(observed))
