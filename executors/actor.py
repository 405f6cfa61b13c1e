"""An executor's process: bound steps in, results out. Knows no model; that is the `Executor` it loads by name.

A step that the executor cannot run at all ends the process: the supervisor starts another, and the scheduler
computes everything anew.
"""

from __future__ import annotations

from pathlib import Path

from octavo.core.config.schema import Config
from octavo.core.control import Ready
from octavo.core.messages import PeerDown, PeerUp, Role, StepBind, StepPlan, decode, encode
from octavo.core.plugins import resolve
from octavo.core.shell import Shell
from octavo.core.station import Arrival
from octavo.core.trace.catalogue import StepExecuted, WireDropped
from octavo.core.work import step_work
from octavo.executors.base import Executor


class ExecutorActor(Shell):
    def __init__(self, config: Config, run_dir: Path, generation: int, kind: type[Executor]) -> None:
        super().__init__(config, run_dir, Role.EXECUTOR, generation)
        self._steps = 0
        self._executor = kind.load(config)
        self.link.send(Ready(self._executor.facts))

    def peer(self, news: PeerUp | PeerDown) -> None:
        if news.role is Role.KV and isinstance(news, PeerDown):
            self._executor.forget()

    def take(self, arrival: Arrival) -> None:
        """A plan and, beside it, its bind; the result goes to the scheduler generation that planned it."""
        plan = arrival.body
        bind = decode(arrival.frames[1]) if len(arrival.frames) > 1 else None
        if not isinstance(plan, StepPlan) or not isinstance(bind, StepBind):
            self.events.emit(WireDropped(peer="kv", why=f"{type(plan).__name__} is not a plan with its bind"))
            return
        result = self._executor.execute(plan, bind)
        self._steps += 1
        self.station.send(Role.SCHEDULER, encode(result), dest_gen=plan.scheduler_gen)
        self.events.emit(
            StepExecuted(
                step=plan.step,
                rows=len(result.slot),
                tokens=len(result.tokens),
                started_ns=result.started_ns,
                execute_ns=result.finished_ns - result.started_ns,
                **step_work(plan, bind)._asdict(),
            )
        )

    def stats(self) -> dict[str, int]:
        return {"steps": self._steps}


def run(config: Config, run_dir: Path, generation: int) -> None:
    """Entry point `executor` in the group `octavo.actor`."""
    kind = config.executor.kind or ("ghost" if config.model.path == "ghost" else "cpu")
    ExecutorActor(config, run_dir, generation, resolve("octavo.executor", kind)).run()
