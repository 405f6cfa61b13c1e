"""One replica on a virtual clock: the production scheduler and KV-manager, an executor, and what lies between them.

    client ─▶ scheduler ─StepPlan─▶ KV-manager ─StepPlan+StepBind─▶ executor ─StepResult─▶ scheduler ─▶ client
                  ◀────────StepAck──────┘                            (one step at a time, as long as its cost says)

Nothing is re-implemented: the cores decide, and plan ahead as they do in the daemon. Only time is made up, by the cost
model. Knows nothing of workloads or metrics: `Clients` says who asks what, and `observe` hears every event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from octavo.core.machine import Core
from octavo.core.messages import (
    Body,
    Cancel,
    Deltas,
    Enqueue,
    Hasten,
    PeerUp,
    Refused,
    Role,
    StepBind,
    StepPlan,
    StepResult,
    Stop,
    Tick,
    namespace_name,
)
from octavo.core.trace.catalogue import Event, RequestCancelled, RequestReceived, RequestTokenized, StepExecuted
from octavo.core.work import step_work
from octavo.plugins.sim.cost import CostModel

S, K, E, T = Role.SCHEDULER, Role.KV, Role.EXECUTOR, Role.TOKENIZER

Observe: TypeAlias = Callable[[int, Role, Event], None]
"""Hears (virtual ns, whose, event)."""


class Runs(Protocol):
    """As much of an executor as a simulation needs."""

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult: ...


class Heard(NamedTuple):
    """What an answer means to clients, as their tokenizer would say it: events, and what goes back at once."""

    events: list[Event]
    says: list[Stop]


class Clients(Protocol):
    """Those who ask. Times are virtual ns."""

    def due(self) -> int | None:
        """When the next request is sent; None if nobody will ask before an answer comes."""
        ...

    def ask(self, now_ns: int) -> Enqueue | Cancel | None:
        """The request that is due, or that nobody wants one any more; None if that is settled already."""
        ...

    def hear(self, now_ns: int, answer: Deltas | Refused) -> Heard:
        """What came back."""
        ...


class Machine:
    """`cores` are a scheduler's and a KV-manager's that have heard of nobody yet. `run` until nothing is left to
    happen."""

    def __init__(
        self, cores: Mapping[Role, Core], cost: CostModel, executor: Runs, clients: Clients, observe: Observe
    ) -> None:
        self._cost = cost
        self._executor = executor
        self._clients = clients
        self._observe = observe
        self._cores = cores
        self._events: list[tuple[int, int, Role, tuple[Body, ...]]] = []
        """(when, in which order, to whom, what)"""
        self._order = count()
        self._wakeups: dict[Role, int | None] = {S: None, K: None}
        self._executor_free_ns = 0
        self._hops = {
            (S, K): _ns(cost.to_kv),
            (S, E): _ns(cost.to_executor),
            (K, S): _ns(cost.to_kv),
            (K, E): _ns(cost.to_executor),
            (E, S): _ns(cost.to_scheduler),
            (S, T): _ns(cost.to_client),
            (T, S): _ns(cost.to_client),
        }
        self.now_ns = 0
        for role, peers in ((K, (S, E)), (S, (T, K, E))):
            for peer in peers:
                self.tell(0, role, PeerUp(peer, 1))

    def run(self, tick: Callable[[], None] = lambda: None, most: int | None = None) -> None:
        """`tick` is called now and then, to show progress. It ends after `most` events, if some policy goes on for
        ever."""
        for step in count() if most is None else range(most):
            if step % 4096 == 0:
                tick()
            due = self._clients.due()
            if due is not None and (not self._events or due <= self._events[0][0]):
                self.now_ns = max(self.now_ns, due)
                asked = self._clients.ask(self.now_ns)
                if isinstance(asked, Enqueue):
                    self._announce(asked)
                elif isinstance(asked, Cancel):
                    self._say(T, (RequestCancelled(request_id=asked.request_id, why="cancelled by its client"),))
                if asked is not None:
                    self.tell(self.now_ns + self._hops[T, S], S, asked)
            elif self._events:
                self.now_ns, _, role, messages = heapq.heappop(self._events)
                self._deliver(role, messages)
            else:
                return

    def tell(self, when_ns: int, role: Role, *messages: Body) -> None:
        """A role gets messages at a time, from anybody."""
        heapq.heappush(self._events, (when_ns, next(self._order), role, messages))

    def _deliver(self, role: Role, messages: tuple[Body, ...]) -> None:
        if role is E:
            if isinstance(messages[0], Hasten):
                return  # its rounds are computed at once
            plan, bind = messages
            assert isinstance(plan, StepPlan)
            assert isinstance(bind, StepBind)
            self._execute(plan, bind)
        elif role is T:
            (answer,) = messages
            assert isinstance(answer, Deltas | Refused)
            heard = self._clients.hear(self.now_ns, answer)
            self._say(T, heard.events)
            for stop in heard.says:
                self.tell(self.now_ns + self._hops[T, S], S, stop)
        else:
            (message,) = messages
            if isinstance(message, Tick):
                if self._wakeups[role] != self.now_ns:
                    return  # another message came first, and changed its mind
                self._wakeups[role] = None
            self._apply(role, message)

    def _announce(self, asked: Enqueue) -> None:
        received = RequestReceived(
            request_id=asked.request_id, trace_id="", attempt=0, tenant=asked.tenant, received_ns=self.now_ns
        )
        tokenized = RequestTokenized(
            request_id=asked.request_id,
            prompt_tokens=len(asked.ids),
            max_tokens=asked.max_tokens,
            n=asked.n,
            namespace=namespace_name(asked.namespace),
        )
        self._say(T, (received, tokenized))

    def _apply(self, role: Role, message: Body) -> None:
        outputs = self._cores[role].apply(self.now_ns, message)
        wakeup_ns = None if outputs.wakeup_ns is None else max(outputs.wakeup_ns, self.now_ns + 1)
        if wakeup_ns is not None and wakeup_ns != self._wakeups[role]:
            self.tell(wakeup_ns, role, Tick())
        self._wakeups[role] = wakeup_ns
        self._say(role, outputs.events)
        for out in outputs.messages:
            parts = (message, out.message) if isinstance(out.message, StepBind) else (out.message,)
            self.tell(self.now_ns + self._hops[role, out.role], out.role, *parts)

    def _execute(self, plan: StepPlan, bind: StepBind) -> None:
        """Steps run one after the other, in the order in which they were bound."""
        started = max(self.now_ns, self._executor_free_ns)
        computed = self._executor.execute(plan, bind)
        work = step_work(plan, bind, computed)
        finished = started + _ns(self._cost.duration_s(work))
        result = replace(computed, started_ns=started, finished_ns=finished)
        self._executor_free_ns = finished + _ns(self._cost.between)
        executed = StepExecuted(
            step=plan.step,
            rows=len(result.slot),
            tokens=len(result.tokens),
            started_ns=started,
            execute_ns=finished - started,
            **work._asdict(),
        )
        self._say(E, (executed,))
        self.tell(finished + self._hops[E, S], S, result)

    def _say(self, role: Role, events: Iterable[Event]) -> None:
        for event in events:
            self._observe(self.now_ns, role, event)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
