"""What the supervisor knows of policies: which were set since the start, and which must not be asked any more.

A policy in whose call an actor hung, or ended in any way but being killed from outside, is switched off: the actor's
successor starts with the kernel's own rule in its place. Being killed from outside may be chance once; not twice.
"""

from __future__ import annotations

import signal
from collections import Counter

from octavo.core.control import SetPolicy
from octavo.core.messages import Role
from octavo.core.policy.watch import Asked

CHANCE = 1
"""SIGKILLs from outside (by the kernel for want of memory, say) within a policy's calls that are no fault of its."""


class SetPolicies:
    """By group; for actors that start anew."""

    def __init__(self) -> None:
        self._set: dict[str, SetPolicy] = {}
        self._killed: Counter[Asked] = Counter()

    def set(self, policy: SetPolicy) -> None:
        self._set[policy.group] = policy

    def of(self, role: Role) -> list[SetPolicy]:
        """What the actor must be told."""
        return [policy for policy in self._set.values() if asks(policy.group) is role]

    def blame(self, asked: Asked, code: int, killed_for: str) -> SetPolicy | None:
        """An actor ended while it was asking this policy, killed by the supervisor for a reason or in its own way. The
        message that switches the policy off, if it is to blame and nobody has chosen another since."""
        chosen = self._set.get(asked.group)
        if chosen is not None and chosen.name != asked.policy:
            return None
        if killed_for:
            why = f"its process had to be killed: {killed_for}"
        elif code == -signal.SIGKILL:
            self._killed[asked] += 1
            if self._killed[asked] <= CHANCE:
                return None
            why = f"its process was killed from outside {self._killed[asked]} times during its calls"
        else:
            why = f"its process ended with {exit_text(code)} during its call"
        self._set[asked.group] = SetPolicy(group=asked.group, name=asked.policy, options={}, disabled=why)
        return self._set[asked.group]

    def notes(self) -> list[str]:
        """What is switched off, in words."""
        return [
            f"the {policy.group} policy {policy.name!r} is switched off, the kernel's own rule stands in: "
            f"{policy.disabled}; choose another with `octavo policy set {policy.group}=NAME`"
            for policy in self._set.values()
            if policy.disabled
        ]


def asks(group: str) -> Role:
    """Who asks policies of this group."""
    return Role.KV if group == "eviction" else Role.SCHEDULER


def exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
