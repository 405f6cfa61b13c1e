"""A run as the data of page.html, and the two as one file that loads nothing from anywhere.

Times are microseconds since the first event. Texts that repeat (causes, notes) are sent once, by number.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import msgspec

from octavo.core.trace.catalogue import (
    ActorExited,
    ActorReady,
    GenerationBumped,
    PolicyRejected,
    RequestDelivered,
    RequestTokenized,
    ServiceState,
    StepBound,
)
from octavo.core.trace.life import Life, Piece, lives
from octavo.core.trace.run import Run, StepRecord

Work: TypeAlias = tuple[int, int, str]
"""Start, duration, text."""

LANES = ("scheduler", "kv", "executor", "tokenizer")
TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/*DATA*/ null"
SHOWN_CAUSES = 6
SHOWN_MEMBERS = 12


class Phase(msgspec.Struct, array_like=True):
    """Start, duration, name, and what the time went on: (cause, microseconds, note of its longest piece)."""

    start: int
    took: int
    name: str
    causes: list[tuple[int, int, int]]


class Choice(msgspec.Struct):
    """A row of the picture."""

    id: str
    choice: int
    finish: str
    prompt: int
    cached: int
    output: int
    start: int
    end: int
    first: int | None
    phases: list[Phase]


class Data(msgspec.Struct):
    about: dict[str, str]
    end: int
    lanes: dict[str, list[Work]]
    counters: list[tuple[int, int, int, int, int | None, int | None]]
    """Time, running, waiting, credit, free and evictable blocks."""
    marks: list[tuple[int, str]]
    """What happened to the service."""
    choices: list[Choice]
    texts: list[str]


def render(run: Run, about: dict[str, str]) -> str:
    """The page."""
    # What is text here could end the script there.
    data = msgspec.json.encode(_Collector(run).collect(about)).decode().replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8")
    if PLACE not in template:
        raise ValueError(f"{TEMPLATE} has no place for the data")
    return template.replace(PLACE, data)


class _Collector:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._zero_ns = run.lines[0].ts_ns if run.lines else 0
        self._texts: dict[str, int] = {}

    def collect(self, about: dict[str, str]) -> Data:
        run = self._run
        found = [self._choice(life) for name in run.requests for life in lives(run, name) if life.pieces]
        choices = sorted(found, key=lambda choice: choice.start)
        last = run.lines[-1].ts_ns if run.lines else 0
        return Data(
            about=about,
            end=self._us(last),
            lanes=self._lanes(),
            counters=[self._counts(record) for record in run.steps],
            marks=self._marks(),
            choices=choices,
            texts=list(self._texts),
        )

    def _us(self, ts_ns: int) -> int:
        return (ts_ns - self._zero_ns) // 1000

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _lanes(self) -> dict[str, list[Work]]:
        lanes: dict[str, list[Work]] = {name: [] for name in LANES}
        for record in self._run.steps:
            plan = record.plan
            split = f"{plan.prefill_tokens} prefill and {plan.decode_tokens} decode tokens"
            rounds = f" in {plan.rounds} rounds" if plan.rounds > 1 else ""
            what = f"step {plan.step}: {plan.sequences} sequences, {split}{rounds}"
            planned = record.planned
            lanes["scheduler"].append(
                self._work(planned.ts_ns, planned.spent_ns, f"plan of {what}, {plan.waiting} wait")
            )
            if record.completed is not None:
                done = record.completed
                lanes["scheduler"].append(self._work(done.ts_ns, done.spent_ns, f"result of step {plan.step}"))
            if record.bound is not None and isinstance(record.bound.event, StepBound):
                bound = record.bound.event
                blocks = f"{bound.allocated} blocks taken, {bound.evicted} evicted, {bound.free} free"
                lanes["kv"].append(
                    self._work(record.bound.ts_ns, record.bound.spent_ns, f"bind step {plan.step}: {blocks}")
                )
            if record.executed is not None:
                done_ = record.executed
                lanes["executor"].append(self._work(done_.started_ns, done_.execute_ns, f"{what}\n{_members(record)}"))
        for line in self._run.lines:
            if isinstance(line.event, RequestTokenized):
                text = f"tokenize {line.event.request_id}: {line.event.prompt_tokens} tokens"
                lanes["tokenizer"].append(self._work(line.ts_ns, line.spent_ns, text))
            elif isinstance(line.event, RequestDelivered):
                text = f"last text of {line.event.request_id}, choice {line.event.choice}"
                lanes["tokenizer"].append(self._work(line.ts_ns, line.spent_ns, text))
        return {name: sorted(works) for name, works in lanes.items()}

    def _work(self, start_ns: int, took_ns: int, text: str) -> Work:
        return self._us(start_ns), max(1, took_ns // 1000), text

    def _counts(self, record: StepRecord) -> tuple[int, int, int, int, int | None, int | None]:
        plan = record.plan
        bound = record.bound.event if record.bound is not None else None
        blocks = (bound.free, bound.evictable) if isinstance(bound, StepBound) else (None, None)
        return self._us(record.planned.ts_ns), plan.running, plan.waiting, plan.credit, *blocks

    def _marks(self) -> list[tuple[int, str]]:
        marks = []
        for line in self._run.lines:
            match line.event:
                case ActorExited(actor=actor, pid=pid, code=code):
                    text = f"{actor} (pid {pid}) ended with {code}"
                case ActorReady(actor=actor):
                    text = f"{actor} is ready"
                case GenerationBumped(actor=actor, actor_generation=generation):
                    text = f"{actor} has a new state, generation {generation}"
                case ServiceState(state=state):
                    text = f"the service is {state}"
                case PolicyRejected(group=group, policy=policy):
                    text = f"an answer of the {group} policy {policy} was not valid"
                case _:
                    continue
            marks.append((self._us(line.ts_ns), text))
        return marks

    def _choice(self, life: Life) -> Choice:
        done = life.finished
        return Choice(
            id=life.who.request_id,
            choice=life.who.choice,
            finish=life.finish,
            prompt=done.prompt_tokens if done else 0,
            cached=done.cached if done else 0,
            output=done.output_tokens if done else 0,
            start=self._us(life.pieces[0].start_ns),
            end=self._us(life.pieces[-1].end_ns),
            first=None if life.first_token_ns is None else self._us(life.first_token_ns),
            phases=[
                self._phase(name, list(pieces)) for name, pieces in groupby(life.pieces, key=lambda piece: piece.phase)
            ],
        )

    def _phase(self, name: str, pieces: list[Piece]) -> Phase:
        total: dict[str, int] = {}
        longest: dict[str, Piece] = {}
        for piece in pieces:
            total[piece.cause] = total.get(piece.cause, 0) + piece.took_ns
            if piece.cause not in longest or piece.took_ns > longest[piece.cause].took_ns:
                longest[piece.cause] = piece
        start, end = self._us(pieces[0].start_ns), self._us(pieces[-1].end_ns)
        ranked = sorted(total, key=lambda cause: -total[cause])[:SHOWN_CAUSES]
        causes = [(self._text(cause), total[cause] // 1000, self._text(longest[cause].note)) for cause in ranked]
        return Phase(start, end - start, name, causes)


def _members(record: StepRecord) -> str:
    names = [who.request_id for who in record.members]
    more = f" and {len(names) - SHOWN_MEMBERS} more" if len(names) > SHOWN_MEMBERS else ""
    return ", ".join(names[:SHOWN_MEMBERS]) + more
