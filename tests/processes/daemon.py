"""A real daemon in real processes for a test, and bounded waits on what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from octavo.core.control import ActorStatus, Status
from octavo.core.rundir import RunInfo, process_birth, read
from octavo.core.supervisor.status import ask
from octavo.core.trace.show import lines

T = TypeVar("T")

PATIENCE_S = 60.0
"""Far beyond what anything here takes on a slow machine."""

STEP_PATH = ("executor", "kv", "scheduler", "tokenizer")


def eventually(what: str, probe: Callable[[], T | None], timeout_s: float = PATIENCE_S) -> T:
    """The first true answer of `probe`; fails, naming `what`, if none comes in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = probe()
        if answer:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def is_running(pid: int) -> bool:
    """False also for a process that has ended and only waits for its parent to notice."""
    return process_birth(pid) is not None


class Daemon:
    """A running `octavo serve` on the ghost. Everything it started is gone when its context ends."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self._log = log

    @property
    def log(self) -> str:
        """Standard error so far."""
        return self._log.read_text()

    def info(self) -> RunInfo:
        info = read(self.run_dir)
        assert info is not None
        return info

    def status(self) -> Status | None:
        return ask(self.info()) if self.process.poll() is None and read(self.run_dir) is not None else None

    def actors(self) -> dict[str, ActorStatus]:
        status = self.status()
        return {} if status is None else {actor.role: actor for actor in status.actors}

    def pids(self) -> dict[str, int]:
        return {role: actor.pid for role, actor in self.actors().items() if actor.pid is not None}

    def generations(self) -> dict[str, int]:
        return {role: actor.generation for role, actor in self.actors().items()}

    def wait_ready(self) -> dict[str, ActorStatus]:
        """Until every actor is ready; the actors."""

        def ready() -> dict[str, ActorStatus] | None:
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log}"
            actors = self.actors()
            return actors if actors and all(actor.state == "ready" for actor in actors.values()) else None

        return eventually("all actors ready", ready)

    def kill(self, role: str, sign: signal.Signals = signal.SIGKILL) -> int:
        """Signal the process of one actor; its pid."""
        pid = self.pids()[role]
        os.kill(pid, sign)
        return pid

    def wait_replaced(self, role: str, pid: int) -> dict[str, ActorStatus]:
        """Until `role` is ready in another process than `pid`, and all others are ready too."""
        eventually(f"another {role}", lambda: self.pids().get(role, pid) != pid)
        return self.wait_ready()

    def wait_end(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    def events(self, name: str) -> list[dict[str, object]]:
        """Events of that name that are in the trace so far: a process writes a little after it has acted."""
        return [event for event in lines(self.run_dir) if event["event"] == name]

    def told(self, name: str, least: int = 1) -> list[dict[str, object]]:
        """Events of that name, once the trace has so many."""

        def enough() -> list[dict[str, object]] | None:
            found = self.events(name)
            return found if len(found) >= least else None

        return eventually(f"{least} times {name}", enough)

    def is_written(self) -> bool:
        """Whether the last step that the trace says is complete is there from all who had a part in it. What the
        scheduler has not yet written is not asked for: wait for a `request.finished` first."""
        last = dict.fromkeys(("step.completed", "step.bound", "step.executed"), 0)
        for event in lines(self.run_dir):
            if (name := event["event"]) in last:
                last[name] = max(last[name], event["step"])
        return last["step.completed"] <= min(last.values())


@contextmanager
def daemon(*sets: str, gateway: bool = False, port: int = 0, model: str = "ghost") -> Iterator[Daemon]:
    """Start one with a small ghost configuration and these `--set` values."""
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder:  # socket paths must be short
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        values = [f"run_dir={run_dir}", "kv.tokens=4096", "kv.block_size=4", "scheduler.chunk_budget=64", *sets]
        values.append(f"server.port={port}" if gateway else "server.enabled=false")
        command = [sys.executable, "-m", "octavo", "serve", model]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*command, *(word for value in values for word in ("--set", value))],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        made = Daemon(process, run_dir, log)
        children: set[int] = set()
        try:
            yield made
        finally:
            children = set(made.pids().values())
            process.kill()
            process.wait()
            eventually("no process is left", lambda: not any(map(is_running, children)))
