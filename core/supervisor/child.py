"""The supervisor's record of one actor: what it is doing, how often it was restarted, whether it still moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.core.config.schema import SupervisorConfig
from octavo.core.control import Progress
from octavo.core.messages import Role
from octavo.core.policy.watch import Asked

UNDER_WAY = ("running", "waiting", "live")
"""Stats that count requests (of the tokenizer) and sequences (of the scheduler) that are not finished."""


class Phase(StrEnum):
    STARTING = "starting"
    """Its process was asked for; it may still be loading."""
    READY = "ready"
    DOWN = "down"


@dataclass(slots=True)
class Actor:
    role: Role
    generation: int = 1
    phase: Phase = Phase.DOWN
    pid: int | None = None
    identity: bytes | None = None
    """Its routing identity on the control socket, once it said Hello."""
    started_ns: int = 0
    heard_ns: int = 0
    progress: Progress = field(default_factory=Progress)
    moved_ns: int = 0
    """When its count of handled messages last changed, or it was last idle."""
    was_ready: bool = False
    """It was ready at least once in this service's life."""
    restarts: list[int] = field(default_factory=list)
    """Times (ns) of its restarts."""
    killed_for: str = ""
    """What it was killed for, if the supervisor did it."""

    @property
    def name(self) -> str:
        return self.role.name.lower()

    @property
    def is_idle(self) -> bool:
        """Its last heartbeat spoke of no request that is under way."""
        return not any(self.progress.stats.get(key) for key in UNDER_WAY)

    def spawned(self, pid: int, now_ns: int) -> None:
        self.pid, self.identity, self.phase = pid, None, Phase.STARTING
        self.started_ns = self.heard_ns = self.moved_ns = now_ns
        self.killed_for = ""
        self.progress = Progress()

    def exited(self) -> None:
        self.pid, self.identity, self.phase = None, None, Phase.DOWN

    def heard(self, progress: Progress, now_ns: int) -> None:
        if progress.busy_since_ns is None or progress.counter != self.progress.counter:
            self.moved_ns = now_ns
        self.progress = progress

    def complaint(self, config: SupervisorConfig, now_ns: int, asked: Callable[[], Asked | None]) -> str | None:
        """Why its process must be killed, or None. Loading is never called a stall, up to the time to be ready. `asked`
        tells which policy it is asking, whose answer takes no longer than a heartbeat may."""
        if self.pid is None:
            return None
        if self.phase is Phase.STARTING:
            return _beyond("not ready", now_ns - self.started_ns, config.ready_timeout_s)
        silent = _beyond("silent", now_ns - self.heard_ns, config.heartbeat_timeout_s)
        still_ns, limit_s = now_ns - self.moved_ns, config.heartbeat_timeout_s
        policy = asked() if still_ns > limit_s * 1e9 else None
        hung = None if policy is None else _beyond(f"busy with {policy}", still_ns, limit_s)
        return silent or hung or _beyond("busy without progress", still_ns, config.stall_timeout_s)

    def may_restart(self, config: SupervisorConfig, now_ns: int) -> bool:
        """Count a restart; False if it is one too many in the window."""
        window_ns = int(config.restart_window_s * 1e9)
        recent = [at for at in self.restarts if now_ns - at < window_ns]
        self.restarts.append(now_ns)
        return len(recent) < config.max_restarts


def _beyond(what: str, took_ns: int, limit_s: float) -> str | None:
    return f"{what} for {took_ns / 1e9:.1f} s, more than {limit_s:g}" if took_ns > limit_s * 1e9 else None
