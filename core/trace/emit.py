"""Writes events as JSON lines, one file an actor, without ever making the emitter wait.

Emission puts the event into a bounded queue; a thread of its own renders and writes. What finds the queue full is
counted and reported as a `wire.dropped` of peer "trace". Knows every event only as a struct of the catalogue.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
import structlog

from octavo.core.config.schema import TraceConfig
from octavo.core.messages import Role
from octavo.core.trace.catalogue import (
    Event,
    KvEvicted,
    StepBound,
    StepCompleted,
    StepExecuted,
    StepPlanned,
    WireDropped,
)

QUEUE_LIMIT = 20_000
"""Events that may wait for the writer."""

_STEP_EVENTS = (StepPlanned, StepBound, StepExecuted, StepCompleted, KvEvicted)


def trace_path(run_dir: Path, role: Role, replica: int) -> Path:
    return run_dir / f"trace-{role.name.lower()}-{replica}.jsonl"


class Emitter:
    """One actor's event log. `generation` may be changed when the actor's state gets a new one."""

    def __init__(
        self,
        run_dir: Path,
        role: Role,
        config: TraceConfig,
        *,
        replica: int = 0,
        generation: int = 0,
        limit: int = QUEUE_LIMIT,
    ) -> None:
        self.generation = generation
        self._role = role.name.lower()
        self._replica = replica
        self._config = config
        self._limit = limit
        self._dropped = 0
        self._queue: queue.SimpleQueue[tuple[int, int, Event] | None] = queue.SimpleQueue()
        self._path = trace_path(run_dir, role, replica)
        self._thread: threading.Thread | None = None
        if config.enabled:
            self._path.touch(mode=0o600)
            self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
            self._thread.start()

    def emit(self, event: Event) -> None:
        """Never blocks. From one thread only."""
        if self._thread is None or (not self._config.steps and isinstance(event, _STEP_EVENTS)):
            return
        if self._queue.qsize() >= self._limit:
            self._dropped += 1
            return
        self._confess()
        self._queue.put((time.monotonic_ns(), self.generation, event))

    def _confess(self) -> None:
        """Say how many events were lost, as soon as there is room to say it."""
        if self._dropped:
            why = f"{self._dropped} events: the writer's queue of {self._limit} was full"
            self._queue.put((time.monotonic_ns(), self.generation, WireDropped(peer="trace", why=why)))
            self._dropped = 0

    def close(self) -> None:
        """Write what waits."""
        if self._thread is not None:
            self._confess()
            self._queue.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        with self._path.open("ab+") as file:
            if _is_cut(file):
                file.write(b"\n")
            log: Any = structlog.wrap_logger(
                structlog.BytesLogger(file),
                processors=[structlog.processors.JSONRenderer(serializer=_json)],
                wrapper_class=structlog.BoundLogger,
                context_class=dict,
            )
            while (item := self._queue.get()) is not None:
                ts_ns, generation, event = item
                fields = msgspec.to_builtins(event)
                name = fields.pop("event")
                log.msg(name, ts_ns=ts_ns, role=self._role, replica=self._replica, generation=generation, **fields)


def _is_cut(file: BinaryIO) -> bool:
    """Whether the last line was left unfinished, by a process that died at it."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _json(fields: dict[str, Any], **_: Any) -> bytes:
    return msgspec.json.encode(fields)
