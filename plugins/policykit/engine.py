"""A small engine for one policy: the simulator's machine with made-up costs and the ghost executor.

The ghost is found by its entry point. A step takes `STEP_NS`, and `TOKEN_NS` for each of its tokens; messages take no
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.core.kv.core import KvCore
from octavo.core.messages import Body, Deltas, Enqueue, Facts, Refused, Role, Sampling, col
from octavo.core.plugins import resolve
from octavo.core.policy import Policies, PolicyHost
from octavo.core.scheduler.core import SchedulerCore
from octavo.core.trace.catalogue import Event, StepExecuted
from octavo.plugins.sim.cost import CostModel
from octavo.plugins.sim.machine import Heard, Machine

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
        self.result_ns: list[int] = []
        """When results came."""
        self.events: list[Event] = []
        self._scheduler = SchedulerCore(
            host=host, generation=1, slots=slots, block_size=block_size, total_blocks=blocks, context=facts.context,
            chunk_budget=budget, depth=2, waiting_window=window,
        )  # fmt: skip
        kv = KvCore(total_blocks=blocks, block_size=block_size, slots=slots, eviction=host, generation=1)
        cost = CostModel(
            step=STEP_NS / 1e9, prefill_token=token_ns / 1e9, decode=token_ns / 1e9, attention=0.0, kv_token=0.0,
            copied_block=0.0, to_kv=0.0, to_executor=0.0, to_scheduler=0.0, to_client=0.0,
        )  # fmt: skip
        self._clients = _Clients()
        self._machine = Machine(
            {Role.SCHEDULER: self._scheduler, Role.KV: kv}, cost, resolve("octavo.executor", "ghost")(facts),
            self._clients, self._observe,
        )  # fmt: skip

    def run(self, asked: list[Asked], most_events: int = 100_000) -> None:
        """Until every request is answered or nothing moves any more."""
        self._clients.take(asked)
        self._machine.run(most=most_events)

    def tell(self, at_ns: int, message: Body, *, kv: bool = False) -> None:
        """Something else to be told during the run, at a time."""
        self._machine.tell(at_ns, Role.KV if kv else Role.SCHEDULER, message)

    @property
    def overruled(self) -> int:
        """How often the kernel had to step in so that something moved."""
        return self._scheduler.stats["policy_overruled"]

    def _observe(self, now_ns: int, role: Role, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StepExecuted):
            self.result_ns.append(event.started_ns + event.execute_ns)


class _Clients:
    """Asks what a workload says, and writes into it what comes back."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []
        self._coming: deque[int] = deque()

    def take(self, asked: list[Asked]) -> None:
        self._asked = asked
        self._coming.extend(sorted(range(len(asked)), key=lambda handle: asked[handle].at_ns))

    def due(self) -> int | None:
        return self._asked[self._coming[0]].at_ns if self._coming else None

    def ask(self, now_ns: int) -> Enqueue:
        handle = self._coming.popleft()
        one = self._asked[handle]
        ids = [(handle * 31 + i) % 251 if i >= 8 else i for i in range(one.prompt)]  # a head that all share
        return Enqueue(
            handle=handle, request_id=f"r{handle}", attempt=0, ids=col(ids), n=1, sampling=Sampling(temperature=0.0),
            max_tokens=one.output, stop_ids=[], tenant=one.tenant, priority=one.priority,
            deadline_ns=None if one.within_ns is None else one.at_ns + one.within_ns,
            namespace=one.tenant.encode(), received_ns=one.at_ns, trace_id="", delivered=[], finished=[],
        )  # fmt: skip

    def hear(self, now_ns: int, answer: Deltas | Refused) -> Heard:
        if isinstance(answer, Refused):
            self._asked[int(answer.request_id[1:])].refused = answer.code
            return Heard([], [])
        at = 0
        for handle, n in zip(answer.handle.tolist(), answer.n.tolist(), strict=True):
            one = self._asked[handle]
            one.first_ns = now_ns if one.first_ns is None else one.first_ns
            one.tokens += answer.tokens[at : at + n].tolist()
            at += n
        for end in answer.ends:
            self._asked[end.handle].done_ns = now_ns
        return Heard([], [])


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
