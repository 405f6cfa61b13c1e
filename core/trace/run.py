"""A run's events, indexed by what they are about: requests, steps, who waited for what, which processes ended.

Only puts together what the events say; what it means for one request is in `life`. Pure: lines in, records out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple

from octavo.core.trace.catalogue import (
    ActorExited,
    ActorReady,
    Event,
    RequestAdmitted,
    RequestBlocked,
    RequestChunk,
    RequestEvent,
    RequestFinished,
    StepBound,
    StepCompleted,
    StepExecuted,
    StepPlanned,
)
from octavo.core.trace.read import Line


class Who(NamedTuple):
    """One choice of a request."""

    request_id: str
    choice: int


class Chunk(NamedTuple):
    start: int
    tokens: int


@dataclass(slots=True)
class StepRecord:
    """What is known of one step; what did not happen (or was not written) is None."""

    planned: Line
    plan: StepPlanned
    members: list[Who] = field(default_factory=list)
    chunks: dict[Who, Chunk] = field(default_factory=dict)
    bound: Line | None = None
    executed: StepExecuted | None = None
    completed: Line | None = None

    @property
    def done_ns(self) -> int | None:
        """When the scheduler had its result."""
        return None if self.completed is None else self.completed.ts_ns

    @property
    def ran_ns(self) -> tuple[int, int] | None:
        """From when to when the executor computed it."""
        done = self.executed
        return None if done is None else (done.started_ns, done.started_ns + done.execute_ns)


class Wait(NamedTuple):
    """For a while, the first in the queue waited for this; the numbers are those of `request_id`."""

    start_ns: int
    end_ns: int
    resource: str
    request_id: str
    need: int
    have: int


class Run:
    """The index. `lines` must be in order of time."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = list(lines)
        self.requests: dict[str, list[Line]] = {}
        self.steps: list[StepRecord] = []
        self.exits: list[tuple[int, ActorExited]] = []
        self.admissions: list[tuple[int, RequestAdmitted]] = []
        self.owners: dict[tuple[int, int], Who] = {}
        """By the scheduler's generation and open_id."""
        self.drafter = ""
        """Who guesses tokens ahead; "" where nobody does, or where the executor's start is not in the lines."""
        self._by_number: dict[int, StepRecord] = {}
        """The last plan of each number: a new generation of the scheduler counts anew."""
        self._blocked: list[tuple[int, RequestBlocked]] = []
        self._ends: dict[Who, list[int]] = {}
        for line in self.lines:
            self._take(line)
        self.steps_of: dict[Who, list[StepRecord]] = {}
        self._join()
        self.waits = list(self._merged_waits())
        self._wait_starts = [wait.start_ns for wait in self.waits]

    def waits_in(self, start_ns: int, end_ns: int) -> list[Wait]:
        """What the head of the queue waited for in this time, cut to it."""
        first = max(0, bisect_right(self._wait_starts, start_ns) - 1)
        cut = (
            wait._replace(start_ns=max(wait.start_ns, start_ns), end_ns=min(wait.end_ns, end_ns))
            for wait in self.waits[first : bisect_right(self._wait_starts, end_ns)]
        )
        return [wait for wait in cut if wait.start_ns < wait.end_ns]

    def admitted_in(self, start_ns: int, end_ns: int) -> list[str]:
        """The requests that were given a slot in this time, in order."""
        first = bisect_left(self.admissions, start_ns, key=lambda entry: entry[0])
        last = bisect_left(self.admissions, end_ns, key=lambda entry: entry[0])
        return list(dict.fromkeys(event.request_id for _, event in self.admissions[first:last]))

    def step_at(self, ts_ns: int) -> StepRecord | None:
        """The step planned last by then."""
        at = bisect_right(self.steps, ts_ns, key=lambda record: record.planned.ts_ns)
        return self.steps[at - 1] if at else None

    def step_planned_at(self, ts_ns: int) -> StepRecord | None:
        """The step whose plan says that it was made then."""
        found = self.step_at(ts_ns)
        return found if found is not None and found.planned.ts_ns == ts_ns else None

    def planned_in(self, start_ns: int, end_ns: int) -> int:
        """How many steps were planned after the one and before the other."""
        first = bisect_right(self.steps, start_ns, key=lambda record: record.planned.ts_ns)
        return max(0, bisect_left(self.steps, end_ns, key=lambda record: record.planned.ts_ns) - first)

    @cached_property
    def usual_execute_ns(self) -> int:
        """The median of a round of steps without prefill; 0 if there are none."""
        took = [
            r.executed.execute_ns // r.executed.rounds for r in self.steps if r.executed is not None and not r.chunks
        ]
        return int(median(took)) if took else 0

    def exit_before(self, ts_ns: int) -> ActorExited | None:
        """The last process that had ended by then."""
        at = bisect_right(self.exits, ts_ns, key=lambda entry: entry[0])
        return self.exits[at - 1][1] if at else None

    # ── building ─────────────────────────────────────────────────────────────────────────────────

    def _take(self, line: Line) -> None:
        event = line.event
        if isinstance(event, RequestEvent):
            self.requests.setdefault(event.request_id, []).append(line)
            self._take_request(line, event)
        elif isinstance(event, StepPlanned):
            self._by_number[event.step] = record = StepRecord(line, event)
            self.steps.append(record)
        elif isinstance(event, ActorExited):
            self.exits.append((line.ts_ns, event))
        elif isinstance(event, ActorReady):
            self.drafter = event.drafter or self.drafter
        else:
            self._take_step(line, event)

    def _take_request(self, line: Line, event: RequestEvent) -> None:
        match event:
            case RequestAdmitted():
                who = Who(event.request_id, event.choice)
                self.owners[line.generation, event.open_id] = who
                self.admissions.append((line.ts_ns, event))
                self._ends.setdefault(who, []).append(line.ts_ns)
            case RequestChunk():
                if (record := self._by_number.get(event.step)) is not None:
                    record.chunks[Who(event.request_id, event.choice)] = Chunk(event.start, event.tokens)
            case RequestBlocked():
                self._blocked.append((line.ts_ns, event))
            case RequestFinished():
                self._ends.setdefault(Who(event.request_id, event.choice), []).append(line.ts_ns)
            case _:
                pass

    def _take_step(self, line: Line, event: Event) -> None:
        if not isinstance(event, StepBound | StepExecuted | StepCompleted):
            return
        record = self._by_number.get(event.step)
        if record is None:
            return
        match event:
            case StepBound():
                record.bound = line
            case StepExecuted():
                record.executed = event
            case StepCompleted():
                record.completed = line

    def _join(self) -> None:
        """Who was in each step."""
        for record in self.steps:
            for open_id in record.plan.open_ids:
                who = self.owners.get((record.planned.generation, open_id))
                if who is not None:
                    record.members.append(who)
                    self.steps_of.setdefault(who, []).append(record)

    def _merged_waits(self) -> list[Wait]:
        """Those that follow each other for the same resource are one."""
        found: list[Wait] = []
        for ts_ns, event in self._blocked:
            if event.resource == "parent":
                continue  # nobody waits behind it
            ends = self._ends.get(Who(event.request_id, event.choice), [])
            at = bisect_right(ends, ts_ns)
            end_ns = ends[at] if at < len(ends) else self.lines[-1].ts_ns
            if found and found[-1].end_ns > ts_ns:
                if found[-1].resource == event.resource:
                    found[-1] = found[-1]._replace(end_ns=max(found[-1].end_ns, end_ns))
                    continue
                found[-1] = found[-1]._replace(end_ns=ts_ns)
            found.append(Wait(ts_ns, end_ns, event.resource, event.request_id, event.need, event.have))
        return found
