"""What the supervisor's core asks of its shell."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from octavo.core.control import SetShadow, ToMember
from octavo.core.messages import Role
from octavo.core.trace.catalogue import Event


class Spawn(NamedTuple):
    """Start the process of `role`."""

    role: Role
    generation: int


class Kill(NamedTuple):
    """SIGKILL the process of `role`."""

    role: Role


class StartShadow(NamedTuple):
    """Start the process of a shadow, in place of the one of its group that may be there."""

    shadow: SetShadow


class EndShadow(NamedTuple):
    """SIGKILL the shadow of this group: it may hang."""

    group: str


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


Action: TypeAlias = Spawn | Kill | StartShadow | EndShadow | Tell | Note | Say | Stop
