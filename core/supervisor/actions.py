"""What the supervisor's core asks of its shell."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from octavo.core.control import ToMember
from octavo.core.messages import Role
from octavo.core.trace.catalogue import Event


class Spawn(NamedTuple):
    """Start the process of `role`."""

    role: Role
    generation: int


class Kill(NamedTuple):
    """SIGKILL the process of `role`."""

    role: Role


class Tell(NamedTuple):
    """Send to one member, by its routing identity."""

    identity: bytes
    message: ToMember


class Note(NamedTuple):
    """Write an event to the trace."""

    event: Event


class Say(NamedTuple):
    """Write a line to the ordinary log."""

    level: str
    text: str


class Stop(NamedTuple):
    """Stop every process; the service ends with this exit code."""

    code: int
    why: str


Action: TypeAlias = Spawn | Kill | Tell | Note | Say | Stop
