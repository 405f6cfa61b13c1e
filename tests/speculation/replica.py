"""A replica in one thread: the production scheduler and KV-manager around an executor with a model and a drafter.

Messages are delivered in order, results last, so that as many steps as may be are planned ahead of theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.config.schema import PolicyConfig
from octavo.core.kv.core import KvCore
from octavo.core.messages import (
    Body,
    Deltas,
    Enqueue,
    PeerDown,
    PeerUp,
    Role,
    Sampling,
    StepBind,
    StepPlan,
    StepResult,
    TokenLogprob,
    col,
)
from octavo.core.policy import PolicyHost, load_policies
from octavo.core.scheduler.core import SchedulerCore
from octavo.core.trace.catalogue import Event, KvLeak, KvOverdraft, PolicyRejected
from octavo.executors.base import Ahead, Executor

GREEDY = Sampling(temperature=0.0)
STEP_NS = 1_000_000
TOKEN_NS = 50_000
"""A step takes `STEP_NS` and so much for each of its tokens; messages take no time."""


def asked(
    handle: int, ids: Sequence[int], *, tokens: int, sampling: Sampling = GREEDY, n: int = 1, tenant: str = ""
) -> Enqueue:
    return Enqueue(
        handle=handle, request_id=f"r{handle}", attempt=0, ids=col(ids), n=n, sampling=sampling, max_tokens=tokens,
        stop_ids=[], tenant=tenant, priority=0, deadline_ns=None, namespace=tenant.encode(), received_ns=0, trace_id="",
        delivered=[], finished=[],
    )  # fmt: skip


class Replica:
    """`policy` (with `options`) says how many tokens are drafted. After `crash_at` results the executor dies once, with
    everything that it and the KV-manager hold. Time is made up (a step takes as long as its tokens say), or `clock`'s.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        policy: str = "fixed",
        options: dict[str, Any] | None = None,
        slots: int = 4,
        depth: int = 2,
        budget: int = 64,
        crash_at: int = -1,
        caching: bool = True,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.executor = executor
        self._facts = executor.facts
        self._slots = slots
        self._caching = caching
        config = PolicyConfig(speculation=policy, options={"speculation": options or {}})
        self._host = PolicyHost(load_policies(config))
        self.scheduler = SchedulerCore(
            host=self._host, generation=1, slots=slots, block_size=self._facts.block_size,
            total_blocks=self._facts.total_blocks, context=self._facts.context, chunk_budget=budget, depth=depth,
            swaps=self._facts.host_blocks > 0,
        )  # fmt: skip
        self.now_ns = 0
        self.events: list[Event] = []
        self.results: list[StepResult] = []
        self.plans: list[StepPlan] = []
        self.said: dict[tuple[int, int], list[int]] = {}
        """Output ids by handle and choice."""
        self.logprobs: dict[tuple[int, int], list[TokenLogprob | None]] = {}
        self.finish: dict[tuple[int, int], str] = {}
        self.guessed: dict[tuple[int, int], tuple[int, int]] = {}
        """What the tokenizer is told of each choice's guesses: verified, right."""
        self._crash_at = crash_at
        self._clock = clock
        self._mail: deque[tuple[Role, Body]] = deque()
        self._late: deque[StepResult] = deque()
        executor.forget()
        self._start_kv(1)

    def _start_kv(self, generation: int) -> None:
        self.kv = KvCore(
            total_blocks=self._facts.total_blocks, block_size=self._facts.block_size, slots=self._slots,
            eviction=self._host, generation=generation, caching=self._caching, host_blocks=self._facts.host_blocks,
            prompts_apart=self._facts.prompts_apart,
        )  # fmt: skip
        self._mail += [(Role.KV, PeerUp(Role.SCHEDULER, 1)), (Role.SCHEDULER, PeerUp(Role.EXECUTOR, generation))]

    def run(self, requests: Sequence[Enqueue]) -> dict[tuple[int, int], list[int]]:
        """What each choice says, once all have ended and nothing is under way."""
        self.submit(requests)
        choices = {(request.handle, choice) for request in requests for choice in range(request.n)}
        for _ in range(100_000):
            if not self.advance():
                break
        waiting = choices - self.finish.keys()
        assert not waiting, f"nothing moves: {self.scheduler.stats}, {waiting} wait"
        return {key: self.said.get(key, []) for key in sorted(choices)}

    def submit(self, requests: Sequence[Enqueue]) -> None:
        self._mail += [(Role.SCHEDULER, request) for request in requests]

    def advance(self) -> bool:
        """Deliver a message, or the result of a step; False if there is nothing to deliver and no step under way."""
        if self._mail:
            self._deliver(*self._mail.popleft())
        elif self._late:
            self._answer(self._late.popleft())
        elif isinstance(self.executor, Ahead) and self.executor.under_way:
            self._late += self.executor.end()
        else:
            return False
        return True

    @property
    def drafted(self) -> int:
        return sum(int(result.drafted.sum()) for result in self.results)

    @property
    def accepted(self) -> int:
        return sum(int((result.n_new - 1)[result.drafted > 0].sum()) for result in self.results if len(result.drafted))

    def _answer(self, result: StepResult) -> None:
        if len(self.results) == self._crash_at:
            self._crash_at = -1
            self._mail.clear()
            self._late.clear()
            self.executor.forget()
            self._mail += [(Role.SCHEDULER, PeerDown(role)) for role in (Role.EXECUTOR, Role.KV)]
            self._start_kv(2)
            return
        self.now_ns += STEP_NS + TOKEN_NS * int(self.plans[len(self.results)].n.sum())
        self.results.append(result)
        self._mail.append((Role.SCHEDULER, result))

    def _deliver(self, role: Role, message: Body) -> None:
        if self._clock is not None:
            self.now_ns = self._clock()
        if role is Role.TOKENIZER:
            self._told(message)
            return
        outputs = (self.scheduler if role is Role.SCHEDULER else self.kv).apply(self.now_ns, message)
        assert not any(isinstance(event, KvLeak | KvOverdraft | PolicyRejected) for event in outputs.events)
        self.events += outputs.events
        for out in outputs.messages:
            if isinstance(out.message, StepBind):
                assert isinstance(message, StepPlan)
                self.plans.append(message)
                if isinstance(self.executor, Ahead):
                    self._late += self.executor.begin(message, out.message)
                else:
                    self._late.append(self.executor.execute(message, out.message))
            elif out.role is not Role.EXECUTOR:
                self._mail.append((out.role, out.message))  # type: ignore[arg-type]

    def _told(self, message: Body) -> None:
        assert isinstance(message, Deltas), message
        for handle, choice, _, drafted, accepted in message.guesses.reshape(-1, 5).tolist():
            before = self.guessed.get((handle, choice), (0, 0))
            self.guessed[handle, choice] = before[0] + drafted, before[1] + accepted
        at = 0
        for handle, choice, n in zip(message.handle.tolist(), message.choice.tolist(), message.n.tolist(), strict=True):
            key = handle, choice
            self.said.setdefault(key, []).extend(message.tokens[at : at + n].tolist())
            if message.logprobs is not None:
                self.logprobs.setdefault(key, []).extend(message.logprobs[at : at + n])
            at += n
        for end in message.ends:
            self.finish[end.handle, end.choice] = end.reason
