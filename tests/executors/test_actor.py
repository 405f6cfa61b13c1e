"""An executor's process with a step under way: it looks for the step's end and for the next plan in turn."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from octavo.core.config.schema import Config
from octavo.core.messages import EMPTY, Header, PeerDown, Role, StepBind, StepPlan, StepResult, decode, encode
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


class Line:
    """The actor without its sockets, and the steps that it has told the scheduler of."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[int] = []
        self.late = Late()

        def begin(shell: Shell, config: Config, run_dir: Path, role: Role, generation: int) -> None:
            shell.events = shell.link = shell.station = self  # type: ignore[assignment]

        monkeypatch.setattr(Shell, "__init__", begin)
        monkeypatch.setattr(actor, "load_executor", lambda config, run_dir, first: Chosen(self.late, "late"))
        self.actor = ExecutorActor(Config(), folder, 1)

    def emit(self, event: object) -> None: ...

    def send(self, to: object, body: bytes = b"", **how: int) -> None:
        if to is Role.SCHEDULER:
            result = decode(body)
            assert isinstance(result, StepResult)
            self.told.append(result.step)

    def take(self, step: int) -> None:
        none = EMPTY
        plan = StepPlan(
            1, step, step, none, none, none, none, none, none, none, [], [], none, none, none, none, none, step - 1, []
        )
        bind = StepBind(1, step, none, none, none, none, none, none, none, none, none, none, none, none, none)
        self.actor.take(Arrival([], Header(1, 0, Role.KV, 1, 1, step, 0), plan, [encode(plan), encode(bind)]))

    def turn(self) -> None:
        """As the loop does it where no message came."""
        if self.actor.wakeup_ns is not None and time.monotonic_ns() >= self.actor.wakeup_ns:
            self.actor.tick()


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(tmp_path, monkeypatch)


def test_a_step_is_told_of_when_it_has_ended_or_the_next_begins(line: Line) -> None:
    line.take(1)
    line.turn()
    assert line.told == []
    line.take(2)
    assert line.told == [1]
    line.late.ended = True
    line.turn()
    assert line.told == [1, 2]
    assert line.late.waits == 1
    assert line.actor.wakeup_ns is None, "with nothing under way it sleeps"


def test_looking_leaves_the_core_to_others(line: Line) -> None:
    line.take(1)
    before, started = line.late.looks, time.monotonic()
    for _ in range(40):
        line.turn()
    assert line.late.looks - before == 40
    assert time.monotonic() - started >= 39 * NAP_S


def test_a_step_that_hangs_is_waited_for(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then heartbeats tell since when the process has been at it."""
    monkeypatch.setattr(actor, "PATIENCE_NS", 0)
    line.take(1)
    line.turn()
    assert line.told == [1]
    assert line.late.waits == 1


def test_what_is_under_way_is_told_of_before_all_is_forgotten(line: Line) -> None:
    line.take(1)
    line.actor.peer(PeerDown(Role.KV))
    assert line.told == [1]
    assert line.late.forgot == 1
