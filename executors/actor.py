"""An executor's process: bound steps in, results out. Knows no model; that is the `Executor` it loads by name.

One that is `Ahead` has a step under way while the process waits for the next plan: it looks for both in turn, and naps
between, so that a step's wait does not take a core.

A step that the executor cannot run at all ends the process: the supervisor starts another, and the scheduler
computes everything anew.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from pathlib import Path

import msgspec

from octavo.core.config.schema import Config
from octavo.core.control import AdapterLost, AdapterRead, Adapters, ReadAdapter, Ready
from octavo.core.messages import (
    Adapter,
    Hasten,
    PeerDown,
    PeerUp,
    Role,
    StepBind,
    StepPlan,
    StepResult,
    decode,
    encode,
)
from octavo.core.models.errors import ModelError
from octavo.core.shell import Shell
from octavo.core.station import Arrival
from octavo.core.trace.catalogue import StepExecuted, WireDropped
from octavo.core.work import step_work
from octavo.executors.adapters import Holds
from octavo.executors.base import Ahead, InRounds
from octavo.executors.choice import load_executor
from octavo.executors.moments import GROWTH, WARM_STEPS, Moment, measure
from octavo.executors.threads import keep_to

PATIENCE_NS = 1_000_000_000
"""A step that takes longer is waited for, so that heartbeats tell of a device that hangs."""
NAP_S = 50e-6
"""Between two looks for a step that is under way: little of a step, and a hundred times what a look takes."""
SIZES = (1, 8, 32, 128, 512, 2048)
"""Steps are counted by the tokens that they computed, up to each of these, and more."""
SIZE_NAMES = (*(f"steps_of_{most}" for most in SIZES), "steps_of_more")


class ExecutorActor(Shell):
    def __init__(self, config: Config, run_dir: Path, generation: int) -> None:
        super().__init__(config, run_dir, Role.EXECUTOR, generation)
        self._steps = self._tokens = self._computed = self._saturated = 0
        self._sizes = [0] * len(SIZE_NAMES)
        self._next_moment = WARM_STEPS
        self.events.emit(measure("before_load", 0, None))
        keep_to(config.executor.cores)
        chosen = load_executor(config, run_dir, first=generation == 1)
        self._executor = chosen.executor
        self._ahead = chosen.executor if isinstance(chosen.executor, Ahead) else None
        self._begun: deque[tuple[StepPlan, StepBind]] = deque()
        """Steps whose results are to come."""
        self._since_ns = 0
        """When a step began to be under way with nothing else to do."""
        if isinstance(self._executor, InRounds):
            self._executor.go_on = self._go_on
        self._hastened = (0, 0)
        """The scheduler's generation and the last step that somebody waits for the end of."""
        facts = self._executor.facts
        adapters = self._configured(config) if generation == 1 else []
        self._measure("after_load")
        how = f"{chosen.kind} ({facts.executor})" if facts.executor else chosen.kind
        how += f", {facts.drafter} guesses" if facts.drafter else ""
        facts = msgspec.structs.replace(facts, executor=how, note=chosen.note)
        self.link.send(Ready(facts, adapters=adapters))

    def _configured(self, config: Config) -> list[Adapter]:
        """The adapters of the configuration; for the first start only: later ones are told what has a name by then.
        Raises `ModelError`."""
        facts, held = self._executor.facts, self._executor.adapters
        if config.lora and held is None:
            raise ModelError(f"the executor that serves {facts.model_id} has no LoRA adapters; native, cpu and cuda do")
        if facts.model_id in config.lora:
            raise ModelError(f"lora.{facts.model_id}: that is the name of the model itself; set model.name, or another")
        return [_load(held, name, path) for name, path in config.lora.items() if held is not None]

    def set_adapters(self, message: Adapters | ReadAdapter) -> None:
        held = self._executor.adapters
        if held is None:
            if isinstance(message, ReadAdapter):
                why = "this executor has no LoRA adapters; native, cpu and cuda do"
                self.link.send(AdapterRead(number=message.number, why=why))
        elif isinstance(message, Adapters):
            before = held.nbytes
            for adapter, why in held.listed(message.adapters):
                self.link.send(AdapterLost(adapter=adapter, why=why))
            if held.nbytes != before:
                self._measure_again()
        elif message.name == self._executor.facts.model_id:
            why = f"{message.name!r} is the model itself; give the adapter another name"
            self.link.send(AdapterRead(number=message.number, why=why))
        else:
            try:
                adapter = held.load(message.name, message.path)
            except ModelError as error:
                self.link.send(AdapterRead(number=message.number, why=str(error)))
            else:
                self.link.send(AdapterRead(number=message.number, adapter=adapter))
                self._measure_again()

    def peer(self, news: PeerUp | PeerDown) -> None:
        if self._ahead is not None:
            self._tell(self._ahead.end())
        if news.role is Role.KV and isinstance(news, PeerDown):
            self._executor.forget()

    def _go_on(self) -> bool:
        """Between two rounds of the plan that is under way: look whether somebody waits for its end."""
        for header, body in self.station.look(Role.SCHEDULER):
            if isinstance(body, Hasten):
                self._hasten(header.source_gen, body)
        generation, step = self._hastened
        plan, _ = self._begun[0]
        return generation != plan.scheduler_gen or plan.step > step

    def _hasten(self, generation: int, asked: Hasten) -> None:
        self._hastened = max(self._hastened, (generation, asked.step))

    def take(self, arrival: Arrival) -> None:
        """A plan and, beside it, its bind; the result goes to the scheduler generation that planned it."""
        plan = arrival.body
        if isinstance(plan, Hasten):
            self._hasten(arrival.header.source_gen, plan)
            return
        bind = decode(arrival.frames[1]) if len(arrival.frames) > 1 else None
        if not isinstance(plan, StepPlan) or not isinstance(bind, StepBind):
            self.events.emit(WireDropped(peer="kv", why=f"{type(plan).__name__} is not a plan with its bind"))
            return
        self._begun.append((plan, bind))
        self._tell([self._executor.execute(plan, bind)] if self._ahead is None else self._ahead.begin(plan, bind))

    def tick(self) -> None:
        """Look whether the step that is under way has ended: whatever comes first, its end or the next plan."""
        if self._ahead is None:
            return
        if self._ahead.there or time.monotonic_ns() - self._since_ns > PATIENCE_NS:
            self._tell(self._ahead.end())
        else:
            time.sleep(NAP_S)

    def _tell(self, results: list[StepResult]) -> None:
        for result in results:
            self._report(*self._begun.popleft(), result)
        self._since_ns = time.monotonic_ns()
        self.wakeup_ns = self._since_ns if self._ahead is not None and self._ahead.under_way else None

    def _report(self, plan: StepPlan, bind: StepBind, result: StepResult) -> None:
        self.station.send(Role.SCHEDULER, encode(result), dest_gen=plan.scheduler_gen)
        self._steps += result.rounds
        self._tokens += len(result.tokens)
        work = step_work(plan, bind, result)
        self._count(work.prefill_tokens + work.decodes + work.guesses, result.rounds)
        before, self._saturated = self._saturated, self._executor.stats.get("kv_saturated", 0)
        self.events.emit(
            StepExecuted(
                step=plan.step,
                rows=len(result.slot),
                tokens=len(result.tokens),
                started_ns=result.started_ns,
                execute_ns=result.finished_ns - result.started_ns,
                saturated=self._saturated - before,
                **work._asdict(),
            )
        )
        if self._steps >= self._next_moment:
            self._measure("warmed_up" if self._next_moment == WARM_STEPS else "under_load")
            self._next_moment *= GROWTH

    def _measure(self, moment: Moment) -> None:
        held = self._executor.adapters
        self.events.emit(measure(moment, self._steps, self._executor.facts, 0 if held is None else held.nbytes))

    def _measure_again(self) -> None:
        """Adapters came or went. Before the first steps are done, their moment will show it."""
        if self._steps > WARM_STEPS:
            self._measure("under_load")

    def _count(self, computed: int, rounds: int) -> None:
        self._computed += computed * rounds
        self._sizes[bisect_left(SIZES, computed)] += rounds

    def stats(self) -> dict[str, int]:
        sizes = dict(zip(SIZE_NAMES, self._sizes, strict=True))
        return {
            "steps": self._steps,
            "tokens": self._tokens,
            "computed": self._computed,
            **sizes,
            **self._executor.stats,
        }


def _load(held: Holds, name: str, path: str) -> Adapter:
    try:
        return held.load(name, path)
    except ModelError as error:
        raise ModelError(f"lora.{name}: {error}") from error


def run(config: Config, run_dir: Path, generation: int) -> None:
    """Entry point `executor` in the group `octavo.actor`."""
    ExecutorActor(config, run_dir, generation).run()
