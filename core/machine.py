"""What a pure core is: a state machine that shells, fuzzer, simulator and replay all drive alike.

A core never reads a clock, opens a socket or writes a log. It is told the time and a message, and says
what to send, what happened, and when it wants to be woken if nothing else comes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from octavo.core.messages import Body, Message, Role
from octavo.core.trace.catalogue import Event


class Outbound(NamedTuple):
    """A message and who it is for; `name` picks one of several clients."""

    role: Role
    message: Message
    name: str = ""


class Outputs(NamedTuple):
    messages: list[Outbound]
    events: list[Event]
    wakeup_ns: int | None = None
    """Send a `Tick` at this time unless another message comes first; None: no need."""


class Core(Protocol):
    """The pure part of an actor."""

    def apply(self, now_ns: int, message: Body) -> Outputs:
        """Take one message at monotonic time `now_ns`. Raises only on a bug of our own."""
        ...
