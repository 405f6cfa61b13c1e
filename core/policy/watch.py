"""Who looks on while policies are asked. It changes nothing; in a pure core (fuzzer, simulator, replay) nobody does.

In a process there is a file that outlives it, so that the supervisor can tell which policy it hung or died in:

    byte 0         0, or 1 + the index of the group whose policy has the word
    then, a group  64 bytes: the name of its policy in UTF-8, padded with zeros
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.messages import Role
from octavo.core.policy.load import METHODS
from octavo.policies.contract import Observed

GROUPS = tuple(METHODS)
_NAME = 64
_SIZE = 1 + _NAME * len(GROUPS)


class Watch:
    """Looks on and does nothing."""

    def named(self, names: Mapping[str, str]) -> None:
        """Group → name of its policy, from now on."""

    def begins(self, group: str) -> None:
        """The policy of this group has the word."""

    def ends(self) -> None:
        """It has given it back."""

    def answered(self, group: str, arguments: tuple[Any, ...], answer: Any, spent_ns: int) -> None:
        """What the kernel goes by: the policy's answer, or its own rule's; and how long the policy took."""

    observing = False
    """Whether it wants to know what happened."""

    def observed(self, observed: Observed) -> None:
        """What policies are told of what happened."""


class Asked(NamedTuple):
    """A policy that has the word."""

    group: str
    policy: str

    def __str__(self) -> str:
        return f"the {self.group} policy {self.policy!r}"


class AskedFile(Watch):
    """Keeps the file of this process: two writes to shared memory a call. On a full disk there is none: then nobody
    could tell whom it died in, but it serves."""

    def __init__(self, run_dir: Path, role: Role) -> None:
        path = _path(run_dir, role)
        path.unlink(missing_ok=True)
        try:
            path.touch(mode=0o600)
            path.write_bytes(bytes(_SIZE))  # truncated to it, it could find no room later: by a SIGBUS
            with path.open("r+b") as file:
                self._bytes = mmap.mmap(file.fileno(), _SIZE)
        except OSError:
            self._bytes = mmap.mmap(-1, _SIZE)

    def named(self, names: Mapping[str, str]) -> None:
        for i, group in enumerate(GROUPS):
            self._bytes[1 + i * _NAME : 1 + (i + 1) * _NAME] = names[group].encode()[:_NAME].ljust(_NAME, b"\0")

    def begins(self, group: str) -> None:
        self._bytes[0] = 1 + GROUPS.index(group)

    def ends(self) -> None:
        self._bytes[0] = 0


def read_asked(run_dir: Path, role: Role) -> Asked | None:
    """Which policy the actor's process is asking, or was asking when it ended; None if none."""
    try:
        data = _path(run_dir, role).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _SIZE or not 1 <= data[0] <= len(GROUPS):
        return None
    at = 1 + (data[0] - 1) * _NAME
    return Asked(GROUPS[data[0] - 1], data[at : at + _NAME].rstrip(b"\0").decode(errors="replace"))


def forget_asked(run_dir: Path, role: Role) -> None:
    """Another process begins."""
    _path(run_dir, role).unlink(missing_ok=True)


def _path(run_dir: Path, role: Role) -> Path:
    return run_dir / f"asked-{role.name.lower()}-0"
