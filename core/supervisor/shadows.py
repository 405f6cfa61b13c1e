"""The shadows of policies that run beside the service: a process a group at most, which nothing depends on.

Knows which were asked for and which run. One that ends is not started again.
"""

from __future__ import annotations

from octavo.core.control import SetShadow
from octavo.core.messages import Role
from octavo.core.supervisor.actions import Action, EndShadow, Note, Say, StartShadow
from octavo.core.supervisor.policies import asks, exit_text
from octavo.core.trace.catalogue import ShadowEnded, ShadowStarted


class Shadows:
    def __init__(self) -> None:
        self._asked: dict[str, SetShadow] = {}
        self._pids: dict[str, int] = {}

    def set(self, shadow: SetShadow) -> list[Action]:
        """Another one of its group, or none."""
        self._pids.pop(shadow.group, None)
        if shadow.name:
            self._asked[shadow.group] = shadow
            return [StartShadow(shadow)]
        return [EndShadow(shadow.group)] if self._asked.pop(shadow.group, None) is not None else []

    def started(self, shadow: SetShadow, pid: int) -> list[Action]:
        self._pids[shadow.group] = pid
        return [Note(ShadowStarted(group=shadow.group, policy=shadow.name, pid=pid, options=shadow.options))]

    def ended(self, group: str, pid: int) -> SetShadow | None:
        """By itself, if it is the one that should run."""
        if self._pids.get(group) != pid:
            return None
        del self._pids[group]
        return self._asked.pop(group)

    def of(self, role: Role) -> list[SetShadow]:
        """Those that take copies of this actor's calls."""
        return [shadow for shadow in self._asked.values() if asks(shadow.group) is role]


def epitaph(shadow: SetShadow, pid: int, code: int) -> list[Action]:
    """What is said of a shadow that ended by itself."""
    return [
        Note(ShadowEnded(group=shadow.group, policy=shadow.name, pid=pid, code=code)),
        Say("warning", f"the shadow {shadow.group}={shadow.name} (pid {pid}) ended with {exit_text(code)}"),
    ]
