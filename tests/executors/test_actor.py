"""An executor's process: with a step under way it looks for the step's end and for the next plan in turn; between the
rounds of a plan it looks whether somebody waits."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from octavo.core.config.schema import Config
from octavo.core.messages import (
    EMPTY,
    Body,
    Hasten,
    Header,
    PeerDown,
    Role,
    StepBind,
    StepPlan,
    StepResult,
    decode,
    encode,
)
from octavo.core.shell import Shell
from octavo.core.station import Arrival
from octavo.executors import actor
from octavo.executors.actor import NAP_S, ExecutorActor
from octavo.executors.choice import Chosen
from octavo.executors.ghost import GhostExecutor


class Late(GhostExecutor):
    """Its steps end when `ended` says so, or somebody waits for them."""

    def __init__(self) -> None:
        super().__init__(GhostExecutor.load(Config()).facts)
        self.ended = False
        self.looks = self.waits = self.forgot = 0
        self._step: tuple[StepPlan, StepBind] | None = None

    def begin(self, plan: StepPlan, bind: StepBind) -> list[StepResult]:
        before = self.end()
        self._step, self.ended = (plan, bind), False
        return before

    @property
    def under_way(self) -> bool:
        return self._step is not None

    @property
    def there(self) -> bool:
        self.looks += 1
        return self.ended

    def end(self) -> list[StepResult]:
        if self._step is None:
            return []
        self.waits += not self.ended
        step, self._step = self._step, None
        return [self.execute(*step)]

    def forget(self) -> None:
        assert self._step is None, "what is under way is told of before all is forgotten"
        self.forgot += 1
        super().forget()


class Rounding(GhostExecutor):
    """Computes nothing, four times."""

    def __init__(self) -> None:
        super().__init__(GhostExecutor.load(Config()).facts)

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        rounds = 1
        while rounds < 4 and self.go_on():
            rounds += 1
        return replace_fields(super().execute(plan, bind), rounds=rounds)


def planned(step: int) -> Arrival:
    none = EMPTY
    plan = StepPlan(
        1, step, step, none, none, none, none, none, none, none, [], [], none, none, none, none, none, step - 1, []
    )
    bind = StepBind(1, step, none, none, none, none, none, none, none, none, none, none, none, none, none)
    return Arrival([], Header(1, 0, Role.KV, 1, 1, step, 0), plan, [encode(plan), encode(bind)])


def hastened(step: int, generation: int = 1) -> Arrival:
    asked: Body = Hasten(step)
    return Arrival([], Header(1, 0, Role.SCHEDULER, generation, 1, step, 0), asked, [encode(asked)])


class Line:
    """The actor without its sockets, and the steps that it has told the scheduler of."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, executor: GhostExecutor) -> None:
        self.told: list[int] = []
        self.rounds: list[int] = []
        self.waiting: deque[Arrival] = deque()
        """What the next look into the mailbox finds."""
        self.seen: deque[Arrival] = deque()

        def begin(shell: Shell, config: Config, run_dir: Path, role: Role, generation: int) -> None:
            shell.events = shell.link = shell.station = self  # type: ignore[assignment]

        monkeypatch.setattr(Shell, "__init__", begin)
        monkeypatch.setattr(actor, "load_executor", lambda config, run_dir, first: Chosen(executor, "ghost"))
        self.actor = ExecutorActor(Config(), folder, 1)

    def emit(self, event: object) -> None: ...

    def send(self, to: object, body: bytes = b"", **how: int) -> None:
        if to is Role.SCHEDULER:
            result = decode(body)
            assert isinstance(result, StepResult)
            self.told.append(result.step)
            self.rounds.append(result.rounds)

    def look(self, source: Role) -> list[tuple[Header, Body]]:
        found = list(self.waiting)
        self.waiting.clear()
        self.seen += found
        return [(one.header, one.body) for one in found if one.header.source is source]

    def take_all(self) -> None:
        """As the loop does it, a message at a time."""
        while self.seen:
            self.actor.take(self.seen.popleft())

    def take(self, step: int) -> None:
        self.actor.take(planned(step))

    def turn(self) -> None:
        """As the loop does it where no message came."""
        if self.actor.wakeup_ns is not None and time.monotonic_ns() >= self.actor.wakeup_ns:
            self.actor.tick()


def late(line: Line) -> Late:
    assert isinstance(line.actor._executor, Late)
    return line.actor._executor


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(tmp_path, monkeypatch, Late())


@pytest.fixture
def rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(tmp_path, monkeypatch, Rounding())


def test_a_step_is_told_of_when_it_has_ended_or_the_next_begins(line: Line) -> None:
    line.take(1)
    line.turn()
    assert line.told == []
    line.take(2)
    assert line.told == [1]
    late(line).ended = True
    line.turn()
    assert line.told == [1, 2]
    assert late(line).waits == 1
    assert line.actor.wakeup_ns is None, "with nothing under way it sleeps"


def test_looking_leaves_the_core_to_others(line: Line) -> None:
    line.take(1)
    before, started = late(line).looks, time.monotonic()
    for _ in range(40):
        line.turn()
    assert late(line).looks - before == 40
    assert time.monotonic() - started >= 39 * NAP_S


def test_a_step_that_hangs_is_waited_for(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then heartbeats tell since when the process has been at it."""
    monkeypatch.setattr(actor, "PATIENCE_NS", 0)
    line.take(1)
    line.turn()
    assert line.told == [1]
    assert late(line).waits == 1


def test_what_is_under_way_is_told_of_before_all_is_forgotten(line: Line) -> None:
    line.take(1)
    line.actor.peer(PeerDown(Role.KV))
    assert line.told == [1]
    assert late(line).forgot == 1


def test_all_rounds_are_computed_while_nobody_waits(rounding: Line) -> None:
    rounding.take(1)
    assert rounding.rounds == [4]


def test_a_plan_that_somebody_waits_for_ends_with_its_round(rounding: Line) -> None:
    """So does the one behind it that he was told of, which is already there; plans made since go on."""
    rounding.waiting += [planned(2), hastened(2), planned(3)]
    rounding.take(1)
    rounding.take_all()
    assert (rounding.told, rounding.rounds) == ([1, 2, 3], [1, 1, 4])


def test_who_hastens_may_come_before_the_plan(rounding: Line) -> None:
    rounding.actor.take(hastened(2))
    rounding.take(2)
    rounding.take(3)
    assert rounding.rounds == [1, 4]


def test_a_scheduler_that_is_gone_hastens_nobody(rounding: Line) -> None:
    """Steps are counted from 1 by each; here the plans are of generation 1."""
    rounding.actor.take(hastened(9, generation=0))
    rounding.take(1)
    assert rounding.rounds == [4]


def test_what_comes_between_rounds_waits_for_its_turn(rounding: Line) -> None:
    """While there is always a next plan, the loop must see to the supervisor and to heartbeats between two."""
    rounding.waiting += [planned(step) for step in range(2, 5)]
    rounding.take(1)
    assert rounding.told == [1]
    rounding.take_all()
    assert rounding.told == [1, 2, 3, 4]
