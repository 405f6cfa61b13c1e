"""Writes events as JSON lines, one file an actor, without ever making the emitter wait.

Emission puts the event into a bounded queue; a thread of its own renders and writes. What finds the queue full, or the
disk, is counted and reported as a `wire.dropped` of peer "trace". Knows every event only as a struct of the catalogue.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

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
from octavo.core.trace.log import log

QUEUE_LIMIT = 20_000
"""Events that may wait for the writer."""

REST_S, MOST_REST_S = 0.05, 0.2
"""How long the writer lets events come together, and how long at most while they do not cease: what wakes it in the
middle of a step takes its time from the step."""

encode = msgspec.json.Encoder().encode
"""An event as JSON."""

Emitted: TypeAlias = tuple[int, int, int, Event]
"""`ts_ns`, `spent_ns`, generation, event."""

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
        self._queue: queue.SimpleQueue[Emitted | Callable[[], None] | None] = queue.SimpleQueue()
        self._path = trace_path(run_dir, role, replica)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if config.enabled:
            self._path.touch(mode=0o600)
            self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
            self._thread.start()

    def emit(self, event: Event, at_ns: int | None = None) -> None:
        """Never blocks. From one thread only. `at_ns` is when its cause was told, if that was before now."""
        if self._thread is None or (not self._config.steps and isinstance(event, _STEP_EVENTS)):
            return
        if self._queue.qsize() >= self._limit:
            self._dropped += 1
            return
        self._confess()
        now_ns = time.monotonic_ns()
        self._queue.put((at_ns or now_ns, now_ns - (at_ns or now_ns), self.generation, event))

    def defer(self, write: Callable[[], None]) -> bool:
        """Have the writer's thread call this, after what was emitted before. It must not raise. False if its queue is
        full, or if there is no trace. Never blocks."""
        if self._thread is None or self._queue.qsize() >= self._limit:
            return False
        self._queue.put(write)
        return True

    def _confess(self) -> None:
        """Say how many events were lost, as soon as there is room to say it."""
        if self._dropped:
            why = f"{self._dropped} events: the writer's queue of {self._limit} was full"
            self._queue.put((time.monotonic_ns(), 0, self.generation, WireDropped(peer="trace", why=why)))
            self._dropped = 0

    def close(self) -> None:
        """Write what waits."""
        if self._thread is not None:
            self._confess()
            self._queue.put(None)
            self._closing.set()
            self._thread.join(timeout=5)
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        """Wakes now and then and writes all that has come: handing the interpreter over for every single event would
        cost the emitter more than the events do."""
        with self._path.open("ab+", buffering=0) as file:
            events = structlog.wrap_logger(_Sink(file), processors=[_render], wrapper_class=_Log)
            events = events.bind(source=b'"role":"%b","replica":%d' % (self._role.encode(), self._replica))
            open_, rest_s, lost = True, REST_S, 0
            while open_:
                rest_s = REST_S if self._queue.empty() else min(2 * rest_s, MOST_REST_S)
                come: list[Emitted] = []
                for _ in range(max(1, self._queue.qsize())):
                    item = self._queue.get()
                    if isinstance(item, tuple):
                        come.append(item)
                    elif item is None:
                        open_ = False
                    else:
                        item()
                if come:
                    lost = self._written(events, come, lost)
                if open_:
                    self._closing.wait(rest_s)

    def _written(self, events: Any, come: list[Emitted], lost: int) -> int:
        """How many events are lost now, of these and of those before. A full disk takes what comes meanwhile, no more:
        the log says so at once, and the trace itself as soon as there is room."""
        told = come
        if lost:
            why = f"up to {lost} events: they could not be written"
            told = [(come[0][0], 0, come[0][2], WireDropped(peer="trace", why=why)), *come]
        try:
            events.lines(told)
        except OSError as error:
            if not lost:
                log().warning(f"{self._path} cannot be written, events are lost: {error}")
            return lost + len(come)
        return 0


class _Log(structlog.BoundLoggerBase):
    """structlog's way of events to their lines, and nothing beside it; many events at a time."""

    def lines(self, come: list[Emitted]) -> None:
        self._proxy_to_logger("write", None, come=come)


def _render(_logger: Any, _method: str, fields: Any) -> bytes:
    """The common fields of each event, then its own."""
    source = fields["source"]
    return b"".join(
        [
            b'{"ts_ns":%d,"spent_ns":%d,"generation":%d,%b,%b\n'
            % (ts_ns, spent_ns, generation, source, encode(event)[1:])
            for ts_ns, spent_ns, generation, event in fields["come"]
        ]
    )


class _Sink:
    """The logger under structlog: whole lines, many at a time, into a file without a buffer."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._cut = _is_cut(file)

    def write(self, lines: bytes) -> None:
        """Raises OSError if they could not all be written. Where that cut one, the next ones begin on a line of their
        own."""
        rest = memoryview(b"\n" + lines if self._cut else lines)
        while rest:
            rest = rest[self._file.write(rest) :]
            self._cut = bool(rest)


def _is_cut(file: FileIO) -> bool:
    """Whether the last line was left unfinished, by a process that died at it."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
