"""A run in Chrome's trace event format, as Perfetto reads it.

    process per actor ── a slice per step ──┐
                                            ├─ arrows: plan ▶ bind ▶ execute ▶ result
    process "requests" ── phases of each choice, one below the other
    counters: sequences, KV blocks, credit

Times are microseconds since the first event of the run. The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from octavo.core.trace.catalogue import (
    ActorExited,
    ActorReady,
    ActorStarted,
    Event,
    GenerationBumped,
    KvEvicted,
    PolicyRejected,
    RequestDelivered,
    RequestPreempted,
    RequestTokenized,
    ServiceState,
    StepBound,
)
from octavo.core.trace.life import Life, lives
from octavo.core.trace.read import Line
from octavo.core.trace.run import Run, StepRecord

Args: TypeAlias = dict[str, int | float | str]

PROCESSES = {"scheduler": 1, "kv": 2, "executor": 3, "tokenizer": 4, "gateway": 5, "supervisor": 6, "requests": 7}
NAMES = {"kv": "KV-manager"}
INSTANTS = (ActorStarted, ActorReady, ActorExited, GenerationBumped, ServiceState, PolicyRejected, KvEvicted)


class TraceEvent(msgspec.Struct, tag_field="ph", kw_only=True):
    """Base of what the file holds. `ts` in microseconds; a process is an actor, a thread a lane in it."""

    name: str
    pid: int
    tid: int = 1
    ts: float = 0.0
    cat: str = "octavo"


class Metadata(TraceEvent, tag="M", kw_only=True):
    """Names and orders processes and threads."""

    args: Args


class Slice(TraceEvent, tag="X", kw_only=True):
    dur: float
    args: Args


class Counter(TraceEvent, tag="C", kw_only=True):
    args: dict[str, int]


class Instant(TraceEvent, tag="i", kw_only=True):
    s: Literal["t", "p", "g"] = "p"
    args: Args = {}


class Begin(TraceEvent, tag="b", kw_only=True):
    """Of a phase; those with the same `id` lie in one row, inside each other."""

    id: str
    args: Args


class End(TraceEvent, tag="e", kw_only=True):
    id: str


class ArrowStart(TraceEvent, tag="s", kw_only=True):
    """An arrow leaves the slice that encloses `ts`."""

    id: int


class ArrowStep(TraceEvent, tag="t", kw_only=True):
    id: int


class ArrowEnd(TraceEvent, tag="f", kw_only=True):
    id: int
    bp: Literal["e"]


AnyEvent: TypeAlias = Metadata | Slice | Counter | Instant | Begin | End | ArrowStart | ArrowStep | ArrowEnd


class Job(NamedTuple):
    """A part of what an actor did for one message."""

    line: Line
    name: str
    arrow: ArrowStart | ArrowStep | ArrowEnd | None


class Document(msgspec.Struct, kw_only=True, rename="camel"):
    """The file."""

    trace_events: list[AnyEvent]
    display_time_unit: Literal["ms", "ns"] = "ms"
    other_data: dict[str, str] = {}


def document(run: Run, about: dict[str, str]) -> Document:
    """The whole run; `about` is kept beside the events."""
    return Document(trace_events=list(_Writer(run).events()), other_data=about)


class _Writer:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._zero_ns = run.lines[0].ts_ns if run.lines else 0

    def events(self) -> Iterator[AnyEvent]:
        yield from self._names()
        yield from self._slices()
        yield from self._counters()
        yield from self._instants()
        for request_id in self._run.requests:
            for life in lives(self._run, request_id):
                yield from self._life(life)

    def _us(self, ts_ns: int) -> float:
        return (ts_ns - self._zero_ns) / 1000

    def _names(self) -> Iterator[Metadata]:
        for role, pid in PROCESSES.items():
            yield Metadata(name="process_name", pid=pid, args={"name": NAMES.get(role, role)})
            yield Metadata(name="process_sort_index", pid=pid, args={"sort_index": pid})

    # ── actors ───────────────────────────────────────────────────────────────────────────────────

    def _slices(self) -> Iterator[AnyEvent]:
        """A slice for every message that an actor handled, with the arrows that touch it; both at its beginning,
        since a message is sent before all of its cause's work is done."""
        jobs: dict[tuple[str, int], list[Job]] = {}
        for number, record in enumerate(self._run.steps, 1):
            step, planned, bound, completed = record.plan.step, record.planned, record.bound, record.completed
            here = partial(dict[str, Any], name="step", cat="step", id=number)
            start = ArrowStart(pid=PROCESSES["scheduler"], ts=self._us(planned.ts_ns), **here())
            found = [("scheduler", Job(planned, f"plan {step}", start))]
            if bound is not None:
                way = ArrowStep(pid=PROCESSES["kv"], ts=self._us(bound.ts_ns), **here())
                found.append(("kv", Job(bound, f"bind {step}", way)))
            if completed is not None:
                end = ArrowEnd(pid=PROCESSES["scheduler"], ts=self._us(completed.ts_ns), bp="e", **here())
                found.append(("scheduler", Job(completed, f"result {step}", end)))
            for role, job in found:
                jobs.setdefault((role, job.line.ts_ns), []).append(job)
            yield from self._execution(record, number)
        for line in self._run.lines:
            if isinstance(line.event, RequestTokenized | RequestDelivered):
                verb = "tokenize" if isinstance(line.event, RequestTokenized) else "deliver"
                job = Job(line, f"{verb} {line.event.request_id}", None)
                jobs.setdefault(("tokenizer", line.ts_ns), []).append(job)
        for (role, ts_ns), done in jobs.items():
            yield Slice(
                name=", ".join(job.name for job in done),
                pid=PROCESSES[role],
                ts=self._us(ts_ns),
                dur=max(job.line.spent_ns for job in done) / 1000,
                cat=role,
                args={key: value for job in done for key, value in _args(job.line.event).items()},
            )
            yield from (job.arrow for job in done if job.arrow is not None)

    def _execution(self, record: StepRecord, arrow: int) -> Iterator[AnyEvent]:
        if record.executed is None:
            return
        done = record.executed
        work = Slice(
            name=f"step {done.step}",
            pid=PROCESSES["executor"],
            ts=self._us(done.started_ns),
            dur=done.execute_ns / 1000,
            cat="executor",
            args={**_args(record.plan), **_args(done), "members": _members(record)},
        )
        yield work
        yield ArrowStep(name="step", cat="step", pid=work.pid, ts=work.ts, id=arrow)

    def _counters(self) -> Iterator[Counter]:
        for record in self._run.steps:
            plan, ts = record.plan, self._us(record.planned.ts_ns)
            scheduler = PROCESSES["scheduler"]
            yield Counter(
                name="sequences", pid=scheduler, ts=ts, args={"running": plan.running, "waiting": plan.waiting}
            )
            yield Counter(name="credit", pid=scheduler, ts=ts, args={"blocks": plan.credit})
            if record.bound is not None and isinstance(record.bound.event, StepBound):
                bound = record.bound.event
                yield Counter(
                    name="KV blocks",
                    pid=PROCESSES["kv"],
                    ts=self._us(record.bound.ts_ns),
                    args={"free": bound.free, "evictable": bound.evictable},
                )

    def _instants(self) -> Iterator[Instant]:
        for line in self._run.lines:
            event = line.event
            if isinstance(event, INSTANTS):
                name = event.__struct_config__.tag
                pid = PROCESSES[line.role]
                yield Instant(name=str(name), pid=pid, ts=self._us(line.ts_ns), args=_args(event))
            elif isinstance(event, RequestPreempted):
                name = f"preempt {event.request_id}"
                yield Instant(name=name, pid=PROCESSES["scheduler"], ts=self._us(line.ts_ns), args=_args(event))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def _life(self, life: Life) -> Iterator[Begin | End]:
        if not life.pieces:
            return
        pid, name = PROCESSES["requests"], life.who.request_id
        row = f"{name}/{life.who.choice}"
        about: Args = {"choice": life.who.choice, "finish": life.finish, "trace_id": life.trace_id}
        first, last = self._us(life.pieces[0].start_ns), self._us(life.pieces[-1].end_ns)
        yield Begin(name=name, cat="request", pid=pid, ts=first, id=row, args=about)
        for phase, group in groupby(life.pieces, key=lambda piece: piece.phase):
            pieces = list(group)
            causes: Args = {}
            for piece in pieces:
                causes[piece.cause] = round(float(causes.get(piece.cause, 0)) + piece.took_ns / 1e6, 3)
            start, end = self._us(pieces[0].start_ns), self._us(pieces[-1].end_ns)
            yield Begin(name=phase, cat="request", pid=pid, ts=start, id=row, args=causes)
            yield End(name=phase, cat="request", pid=pid, ts=end, id=row)
        yield End(name=name, cat="request", pid=pid, ts=last, id=row)


def _members(record: StepRecord) -> str:
    return ", ".join(f"{who.request_id}/{who.choice}" for who in record.members)


def _args(event: Event) -> Args:
    fields = msgspec.to_builtins(event)
    return {key: value for key, value in fields.items() if isinstance(value, int | float | str) and key != "event"}
