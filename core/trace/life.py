"""What became of each choice of a request, and what every moment of it went on: a chain of pieces without gaps.

    received ─ tokenize ─ handoff ─ queue ─ prefill ─ decode … ─ deliver
                                      ▲                  │
                                      └─ preempted, recovered: queue again, recompute

The pieces of a choice follow each other from the moment its request was received until its client has the last row, so
they sum to its E2E whatever is said of them. What is said is what events show: who was in the step that ran, for which
resource the head of the queue waited, which process had ended. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.trace.catalogue import (
    RequestAdmitted,
    RequestBlocked,
    RequestCancelled,
    RequestDelivered,
    RequestEvent,
    RequestFailed,
    RequestFinished,
    RequestFirstToken,
    RequestMatched,
    RequestPreempted,
    RequestQueued,
    RequestReceived,
    RequestRecovered,
    RequestResumed,
    RequestTaken,
    RequestTokenized,
)
from octavo.core.trace.read import Line
from octavo.core.trace.run import Run, StepRecord, Who

QUEUEING = ("queue", "preempted", "recovery")
"""Phases without a slot."""
RUNNING = ("prefill", "decode", "recompute")
"""Phases in a slot."""
NEIGHBOUR = "a neighbour's prefill"
SLOW_STEP = 8
"""A step that takes so many times the median, without any prefill, is called slow."""


class Piece(NamedTuple):
    """A stretch of time that went on one thing. `cause` is of a small set, `note` has names and numbers."""

    start_ns: int
    end_ns: int
    phase: str
    cause: str
    note: str = ""
    step: int | None = None
    by: str = ""
    """The request that caused it, where one did."""

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Life:
    """One choice, from the request's arrival to its last row."""

    who: Who
    received_ns: int
    trace_id: str = ""
    tenant: str = ""
    pieces: list[Piece] = field(default_factory=list)
    first_token_ns: int | None = None
    end_ns: int | None = None
    """When its client took the last row (or it was sent, if that is not known), or it was cancelled or refused; None
    while it goes on."""
    finish: str = ""
    finished: RequestFinished | None = None
    taken: RequestTaken | None = None
    matched: RequestMatched | None = None
    preempted: list[tuple[RequestPreempted, int]] = field(default_factory=list)
    """Each with its time."""
    token_times: list[int] = field(default_factory=list)
    """When the scheduler had each step's result for it."""

    @property
    def e2e_ns(self) -> int | None:
        return None if self.end_ns is None else self.end_ns - self.received_ns

    @property
    def ttft_ns(self) -> int | None:
        """Until the scheduler had its first token."""
        return None if self.first_token_ns is None else self.first_token_ns - self.received_ns

    @property
    def longest_gap(self) -> tuple[int, int] | None:
        """Start and end of the longest time between two results."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return max(pairs, key=lambda pair: pair[1] - pair[0], default=None)

    def phases(self) -> dict[str, int]:
        """Time by phase, in order of first appearance."""
        total: dict[str, int] = {}
        for piece in self.pieces:
            total[piece.phase] = total.get(piece.phase, 0) + piece.took_ns
        return total

    def causes(self, start_ns: int | None = None, end_ns: int | None = None) -> dict[str, int]:
        """Time by `phase: cause` within these bounds, longest first."""
        total: dict[str, int] = {}
        for piece in self.pieces:
            start = piece.start_ns if start_ns is None else max(piece.start_ns, start_ns)
            end = piece.end_ns if end_ns is None else min(piece.end_ns, end_ns)
            if start < end:
                key = f"{piece.phase}: {piece.cause}"
                total[key] = total.get(key, 0) + end - start
        return dict(sorted(total.items(), key=lambda entry: -entry[1]))


def lives(run: Run, request_id: str) -> list[Life]:
    """One life a choice; empty if the request is not known (or its beginning was not written)."""
    lines = run.requests.get(request_id, [])
    choices = {choice for line in lines if (choice := _choice(line.event)) is not None} or {0}
    made = [_Teller(run, Who(request_id, choice)).tell(lines) for choice in sorted(choices)]
    return [life for life in made if life is not None]


def _choice(event: object) -> int | None:
    choice = getattr(event, "choice", None)
    return choice if isinstance(choice, int) else None


class _Teller:
    """Goes along the events of one choice; each may end one phase and begin the next."""

    def __init__(self, run: Run, who: Who) -> None:
        self._run = run
        self._who = who
        self._life: Life | None = None
        self._phase = "tokenize"
        self._before_resume = ""
        self._for_parent = False
        """It waits for another choice of its request, and not with the others."""
        self._since_ns = 0
        self._done_ns = [(record.done_ns, record) for record in run.steps_of.get(who, []) if record.done_ns is not None]
        self._last_line_ns = run.lines[-1].ts_ns if run.lines else 0

    def tell(self, lines: list[Line]) -> Life | None:
        for line in lines:
            event = line.event
            assert isinstance(event, RequestEvent)  # the run filed it under a request
            if _choice(event) in (None, self._who.choice):
                self._take(line.ts_ns, event)
        life = self._life
        if life is not None:
            if life.end_ns is None:
                self._cut(self._last_line_ns, self._phase)
            elif life.taken is not None:
                life.end_ns = self._to_client(life.end_ns, life.received_ns + life.taken.e2e_ns, life.taken)
            life.token_times = [done for done, _ in self._done_ns if done >= (life.first_token_ns or done)]
        return life

    def _take(self, ts_ns: int, event: RequestEvent) -> None:
        life = self._life
        if life is None:
            if isinstance(event, RequestReceived):
                self._since_ns = event.received_ns
                self._life = Life(self._who, event.received_ns, event.trace_id, event.tenant)
            return
        if isinstance(event, RequestTaken):
            life.taken = event
            return
        if life.end_ns is not None and not isinstance(event, RequestFinished):
            return
        match event:
            case RequestReceived():
                self._before_resume = self._phase if self._phase in RUNNING else self._before_resume
                self._cut(ts_ns, "resume")
            case RequestTokenized():
                if self._phase == "tokenize":
                    self._cut(ts_ns, "handoff")
            case RequestResumed():
                if self._phase == "resume":
                    self._cut(ts_ns, self._before_resume or "queue")
            case RequestQueued():
                self._cut(ts_ns, "queue")
            case RequestMatched():
                if life.matched is None or self._phase == "queue":  # it may find more, the longer it waits
                    life.matched = event
            case RequestBlocked():
                if self._phase in QUEUEING:
                    self._cut(ts_ns, self._phase)
                self._for_parent = event.resource == "parent"
            case RequestAdmitted():
                self._cut(ts_ns, "prefill" if life.first_token_ns is None else "recompute")
                self._for_parent = False
            case RequestFirstToken():
                life.first_token_ns = ts_ns
                self._cut(ts_ns, "decode" if self._phase == "prefill" else self._phase)
            case RequestPreempted():
                life.preempted.append((event, ts_ns))
                self._cut(ts_ns, "preempted")
            case RequestRecovered():
                self._cut(ts_ns, "recovery")
            case RequestFinished():
                life.finished = life.finished or event
                if life.end_ns is None:
                    self._cut(ts_ns, "deliver")
            case RequestDelivered():
                self._end(ts_ns, event.finish)
            case RequestCancelled():
                self._end(ts_ns, "cancelled")
            case RequestFailed():
                self._end(ts_ns, event.code)
            case _:
                pass

    def _end(self, ts_ns: int, finish: str) -> None:
        assert self._life is not None  # only called for a life
        self._cut(ts_ns, "")
        self._life.end_ns, self._life.finish = ts_ns, finish

    def _cut(self, ts_ns: int, phase: str) -> None:
        """The present phase ends here, and `phase` begins."""
        assert self._life is not None  # only called for a life
        end_ns = max(ts_ns, self._since_ns)
        if end_ns > self._since_ns:
            self._life.pieces += self._explain(self._since_ns, end_ns)
        self._since_ns, self._phase = end_ns, phase

    def _to_client(self, sent_ns: int, taken_ns: int, taken: RequestTaken) -> int:
        """The last row's way to the client, and what it lay there. Gives when the client had it."""
        assert self._life is not None  # only called for a life
        came_ns = min(max(sent_ns, taken_ns - taken.last_held_ns), taken_ns)
        if came_ns > sent_ns:
            self._life.pieces.append(Piece(sent_ns, came_ns, "deliver", "tokenizer to client"))
        if taken_ns > came_ns:
            self._life.pieces.append(Piece(came_ns, taken_ns, "deliver", "the client had not taken it"))
        return max(sent_ns, taken_ns)

    # ── what the time went on ────────────────────────────────────────────────────────────────────

    def _explain(self, start_ns: int, end_ns: int) -> list[Piece]:
        phase = self._phase
        if phase in QUEUEING:
            return self._queueing(start_ns, end_ns, phase)
        if phase in RUNNING:
            return self._running(start_ns, end_ns, phase)
        simple = {
            "tokenize": "client to tokenizer, template and vocabulary",
            "handoff": "tokenizer to scheduler",
            "deliver": "scheduler to tokenizer, text",
        }
        if phase == "resume":
            return [Piece(start_ns, end_ns, phase, "a process was lost", self._lost(end_ns))]
        return [Piece(start_ns, end_ns, phase, simple[phase])]

    def _lost(self, ts_ns: int) -> str:
        lost = self._run.exit_before(ts_ns)
        return "" if lost is None else f"{lost.actor} (pid {lost.pid}) had ended"

    def _queueing(self, start_ns: int, end_ns: int, phase: str) -> list[Piece]:
        if self._for_parent:
            return [Piece(start_ns, end_ns, phase, "for parent", _RESOURCES["parent"])]
        pieces: list[Piece] = []
        at = start_ns
        for wait in self._run.waits_in(start_ns, end_ns):
            if phase == "recovery" and wait.resource == "match":
                continue  # nobody answers, since a process was lost
            if wait.start_ns > at:
                pieces.append(self._unblocked(at, wait.start_ns, phase))
            ahead = "" if wait.request_id == self._who.request_id else f"behind {wait.request_id}: "
            numbers = f", needs {wait.need}, there are {wait.have}" if wait.resource in ("blocks", "budget") else ""
            note = f"{ahead}{_RESOURCES.get(wait.resource, wait.resource)}{numbers}"
            pieces.append(Piece(wait.start_ns, wait.end_ns, phase, f"for {wait.resource}", note))
            at = wait.end_ns
        if at < end_ns:
            pieces.append(self._unblocked(at, end_ns, phase))
        return pieces

    def _unblocked(self, start_ns: int, end_ns: int, phase: str) -> Piece:
        """Nobody was refused anything: it waited for the next plan."""
        if phase == "recovery":
            return Piece(start_ns, end_ns, phase, "a process was lost", self._lost(end_ns))
        return Piece(start_ns, end_ns, phase, "for the next plan", "the steps under way come first")

    def _running(self, start_ns: int, end_ns: int, phase: str) -> list[Piece]:
        """Step after step: until the executor began it, while it computed, until the scheduler had the result."""
        pieces: list[Piece] = []
        at = start_ns
        first = bisect_right(self._done_ns, start_ns, key=lambda entry: entry[0])
        for done_ns, record in self._done_ns[first:]:
            if at >= end_ns:
                break
            if phase == "recompute" and self._who not in record.chunks:
                phase = "decode"  # it has caught up
            pieces += self._step(at, min(done_ns, end_ns), phase, record)
            at = min(done_ns, end_ns)
        if at < end_ns:
            pieces.append(Piece(at, end_ns, phase, "no result", self._lost(end_ns) or "its last step gave none"))
        return pieces

    def _step(self, start_ns: int, end_ns: int, phase: str, record: StepRecord) -> list[Piece]:
        """The way of a step: planned, bound, computed, and its result back. It is planned ahead, so its first
        stations often lie before the last step's result, and take no time of their own."""
        step, ran = record.plan.step, record.ran_ns
        if ran is None:
            return [Piece(start_ns, end_ns, phase, "in a step", f"step {step}", step)] if end_ns > start_ns else []
        bound = record.bound or record.planned
        # An actor is done with a cause only after it has sent; the next one may have begun by then.
        planned_ns = min(record.planned.ts_ns + record.planned.spent_ns, bound.ts_ns)
        policies_ns = record.plan.policy_ns
        cause, note, by = self._company(record)
        stations = [
            (record.planned.ts_ns, *self._unplanned(start_ns, record)),
            (planned_ns - policies_ns, "until it is planned", f"by the scheduler, as step {step}"),
            (planned_ns, "policies", f"they took {policies_ns / 1e6:.2f} ms of the planning of step {step}"),
            (bound.ts_ns, "plan on its way", f"to the KV-manager, step {step}"),
            (min(bound.ts_ns + bound.spent_ns, ran[0]), "binding", f"by the KV-manager, step {step}"),
            (ran[0], "until the executor begins", f"step {step}"),
            (ran[1], cause, note),
            (end_ns, "result on its way", f"to the scheduler, step {step}"),
        ]
        pieces: list[Piece] = []
        at = start_ns
        for until_ns, went_on, why in stations:
            until = min(max(until_ns, at), end_ns)
            if until > at:
                pieces.append(Piece(at, until, phase, went_on, why, step, by if went_on == NEIGHBOUR else ""))
            at = until
        return pieces

    def _unplanned(self, start_ns: int, record: StepRecord) -> tuple[str, str]:
        """Why no step was planned for it from then on until this one."""
        step, without = record.plan.step, self._run.planned_in(start_ns, record.planned.ts_ns)
        if without:
            chose = "the chunking policy gave the tokens to" if self._who in record.chunks else "the policies chose"
            return "left out", f"{without} steps were planned without it: {chose} others"
        return "until it is planned", f"by the scheduler, as step {step}"

    def _company(self, record: StepRecord) -> tuple[str, str, str]:
        """What the executor computed beside this choice's own part: cause, note, and whose the most of it was."""
        plan, own = record.plan, record.chunks.get(self._who)
        others = {who: chunk for who, chunk in record.chunks.items() if who != self._who}
        mine = (
            f"its tokens {own.start} to {own.start + own.tokens}" if own else "its next token" + "s" * (plan.rounds > 1)
        )
        if not others:
            many = f" in {plan.rounds} rounds" if plan.rounds > 1 else ""
            note = f"step {plan.step}: {mine}, {plan.sequences} sequences{many}"
            usual_ns = self._run.usual_execute_ns
            took_ns = record.executed.execute_ns // record.executed.rounds if record.executed is not None else 0
            if own is None and 0 < SLOW_STEP * usual_ns < took_ns:
                slow = f"{note}, {took_ns / 1e6:.2f} ms against {usual_ns / 1e6:.2f}"
                return "executor, slower than usual", slow, ""
            return "executor", note, ""
        neighbour, longest = max(others.items(), key=lambda entry: entry[1].tokens)
        tokens = sum(chunk.tokens for chunk in others.values())
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        note = f"step {plan.step}: {mine}, beside {tokens} prefill tokens, {longest.tokens} of them of "
        return NEIGHBOUR, f"{note}{neighbour.request_id}{more}", neighbour.request_id


_RESOURCES = {
    "slots": "all slots are taken",
    "blocks": "the KV pool has no room",
    "budget": "the step's tokens went to others",
    "match": "the KV-manager has not answered yet",
    "parent": "the choice whose prompt it shares is not computed yet",
    "suspect": "a suspect of an executor's death runs alone",
    "preemption": "blocks were just taken from others",
    "policy": "the batching policy chose others",
}
