"""A small engine for one policy: the production scheduler and KV-manager, and the ghost executor, on a virtual clock.

The ghost is found by its entry point. A step takes `STEP_NS`, and `TOKEN_NS` for each of its tokens; messages take no
time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from octavo.core.kv.core import KvCore
from octavo.core.messages import (
    Body,
    Deltas,
    Enqueue,
    Facts,
    PeerUp,
    Refused,
    Role,
    Sampling,
    StepBind,
    StepPlan,
    StepResult,
    Tick,
    col,
)
from octavo.core.plugins import resolve
from octavo.core.policy import Policies, PolicyHost
from octavo.core.scheduler.core import SchedulerCore
from octavo.core.trace.catalogue import Event

STEP_NS = 50_000_000
TOKEN_NS = 100_000


@dataclass
class Asked:
    """A request of the workload, and what became of it."""

    at_ns: int
    prompt: int
    output: int
    tenant: str = ""
    priority: int = 0
    within_ns: int | None = None
    """Time from asking to its deadline."""
    first_ns: int | None = None
    done_ns: int | None = None
    refused: str = ""
    tokens: list[int] = field(default_factory=list)


class Engine:
    """`budget` tokens a step; a step takes `STEP_NS` and `token_ns` for each of its tokens."""

    def __init__(
        self,
        policies: Policies,
        *,
        slots: int = 4,
        blocks: int = 1000,
        block_size: int = 4,
        budget: int = 64,
        token_ns: int = TOKEN_NS,
        weights: Mapping[str, float] | None = None,
        window: int = 256,
    ) -> None:
        host = PolicyHost(policies, weights=weights)
        facts = Facts(
            model_id="ghost", context=2000, vocab_size=260, block_size=block_size, total_blocks=blocks, block_bytes=8,
            cache_seed=b"",
        )  # fmt: skip
        self.now_ns = 0
        self.result_ns: list[int] = []
        """When results came."""
        self.events: list[Event] = []
        self._asked: list[Asked] = []
        self._token_ns = token_ns
        self._scheduler = SchedulerCore(
            host=host, generation=1, slots=slots, block_size=block_size, total_blocks=blocks, context=facts.context,
            chunk_budget=budget, depth=2, waiting_window=window,
        )  # fmt: skip
        self._kv = KvCore(total_blocks=blocks, block_size=block_size, slots=slots, eviction=host, generation=1)
        self._executor = resolve("octavo.executor", "ghost")(facts)
        self._free_at = 0
        """When the executor will have done what it was given."""
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._woken_at: int | None = None
        self._mail: deque[tuple[Role, Body]] = deque()

    def run(self, asked: list[Asked], most_events: int = 100_000) -> None:
        """Until every request is answered or nothing moves any more."""
        self._asked = asked
        self._post(Role.KV, PeerUp(Role.SCHEDULER, 1))
        self._post(Role.SCHEDULER, PeerUp(Role.EXECUTOR, 1))
        for handle, one in enumerate(asked):
            self._at(one.at_ns, lambda h=handle: self._post(Role.SCHEDULER, self._enqueue(h)))  # type: ignore[misc]
        for _ in range(most_events):
            while self._mail:
                self._deliver(*self._mail.popleft())
            if not self._later or all(a.done_ns is not None or a.refused for a in asked):
                return
            self.now_ns, _, act = heapq.heappop(self._later)
            act()

    def tell(self, at_ns: int, message: Body, *, kv: bool = False) -> None:
        """Something else to be told during the run, at a time."""
        self._at(at_ns, lambda: self._post(Role.KV if kv else Role.SCHEDULER, message))

    @property
    def overruled(self) -> int:
        """How often the kernel had to step in so that something moved."""
        return self._scheduler.stats["policy_overruled"]

    def _enqueue(self, handle: int) -> Enqueue:
        one = self._asked[handle]
        ids = [(handle * 31 + i) % 251 if i >= 8 else i for i in range(one.prompt)]  # a head that all share
        return Enqueue(
            handle=handle, request_id=f"r{handle}", attempt=0, ids=col(ids), n=1, sampling=Sampling(temperature=0.0),
            max_tokens=one.output, stop_ids=[], tenant=one.tenant, priority=one.priority,
            deadline_ns=None if one.within_ns is None else one.at_ns + one.within_ns,
            namespace=one.tenant.encode(), received_ns=one.at_ns, trace_id="", delivered=[], finished=[],
        )  # fmt: skip

    # ── who gets what ────────────────────────────────────────────────────────────────────────────

    def _at(self, at_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (at_ns, next(self._order), act))

    def _post(self, role: Role, message: Any) -> None:
        self._mail.append((role, message))

    def _deliver(self, role: Role, message: Body) -> None:
        if role is Role.TOKENIZER:
            self._answered(message)
            return
        core = self._scheduler if role is Role.SCHEDULER else self._kv
        outputs = core.apply(self.now_ns, message)
        self.events += outputs.events
        for out in outputs.messages:
            if isinstance(out.message, StepBind) and isinstance(message, StepPlan):
                self._execute(message, out.message)
            else:
                self._post(out.role, out.message)
        at = outputs.wakeup_ns
        if role is Role.SCHEDULER and at != self._woken_at:
            self._woken_at = at
            if at is not None:
                self._at(max(at, self.now_ns), lambda: self._wake(at))

    def _wake(self, at: int) -> None:
        if at == self._woken_at:
            self._woken_at = None
            self._post(Role.SCHEDULER, Tick())

    def _execute(self, plan: StepPlan, bind: StepBind) -> None:
        result: StepResult = self._executor.execute(plan, bind)
        self._free_at = max(self._free_at, self.now_ns) + STEP_NS + self._token_ns * int(plan.n.sum())
        self.result_ns.append(self._free_at)
        self._at(self._free_at, lambda: self._post(Role.SCHEDULER, result))

    def _answered(self, message: Any) -> None:
        if isinstance(message, Refused):
            self._asked[int(message.request_id[1:])].refused = message.code
        elif isinstance(message, Deltas):
            at = 0
            for handle, n in zip(message.handle.tolist(), message.n.tolist(), strict=True):
                one = self._asked[handle]
                one.first_ns = self.now_ns if one.first_ns is None else one.first_ns
                one.tokens += message.tokens[at : at + n].tolist()
                at += n
            for end in message.ends:
                self._asked[end.handle].done_ns = self.now_ns


def steady() -> list[Asked]:
    """Short requests at half of what the engine can do, and now and then a long one: nobody needs to wait long."""
    short = [
        Asked(i * 250_000_000, 12, 8, "ada" if i % 2 else "bob", i % 3, within_ns=20_000_000_000 if i % 2 else None)
        for i in range(80)
    ]
    long = [Asked(i * 6_000_000_000 + 50_000_000, 120, 30, "cyd", i % 3) for i in range(3)]
    return sorted(short + long, key=lambda a: a.at_ns)


def burst() -> list[Asked]:
    """More than fits at once, for a pool that is small: blocks run short, cached ones are evicted, some lose slots."""
    return [Asked(i * 30_000_000, 8 + i * 7 % 60, 20, "ada" if i % 2 else "bob", i % 3) for i in range(30)]
