"""What the kernel itself costs a step: `python tests/bench/kernel_cost.py` prints tables, kept in tests/results.

plan: the scheduler makes a StepPlan for n decoding sequences. bind: the KV-manager turns it into blocks. take: the
scheduler takes the step's result (tokens, ends, deltas). No sockets, no executor: the production cores alone.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from octavo.core.config.schema import PolicyConfig
from octavo.core.kv.core import KvCore
from octavo.core.kv.pool import chain_key
from octavo.core.messages import (
    Enqueue,
    Kind,
    KvState,
    Match,
    PeerUp,
    Role,
    Sampling,
    StepAck,
    StepPlan,
    StepResult,
    col,
)
from octavo.core.policy import PolicyHost, load_policies
from octavo.core.scheduler.core import SchedulerCore

BLOCK_SIZE, PROMPT, STEPS, WARM_UP = 16, 64, 300, 60


def enqueue(i: int) -> Enqueue:
    return Enqueue(
        handle=i, request_id=f"r{i}", attempt=0, ids=col(np.arange(PROMPT) + i), n=1, sampling=Sampling(),
        max_tokens=4000, stop_ids=[0], tenant="", priority=0, deadline_ns=None, namespace=b"", received_ns=0,
        trace_id="", delivered=[], finished=[],
    )  # fmt: skip


class Loop:
    """Scheduler and KV-manager with a perfect executor: each decode yields one token, at once."""

    def __init__(self, n: int) -> None:
        blocks = n * 300
        host = PolicyHost(load_policies(PolicyConfig()))
        self.scheduler = SchedulerCore(
            host=host, generation=1, slots=n, block_size=BLOCK_SIZE, total_blocks=blocks, context=8192,
            chunk_budget=max(2048, 2 * n), depth=1, max_waiting=2 * n,
        )  # fmt: skip
        self.kv = KvCore(total_blocks=blocks, block_size=BLOCK_SIZE, slots=n, eviction=host, generation=1)
        self.plan_ns: list[int] = []
        self.bind_ns: list[int] = []
        self.take_ns: list[int] = []
        self.objects: list[int] = []
        self.lengths: dict[int, int] = {}
        planner = self.scheduler._planner
        inner = planner.plan

        def timed(now_ns: int, idle: bool) -> object:
            before = time.thread_time_ns()
            made = inner(now_ns, idle)
            self.plan_ns.append(time.thread_time_ns() - before)
            return made

        planner.plan = timed  # type: ignore[method-assign, assignment]
        self.scheduler.apply(0, KvState(blocks, blocks, 0))
        pending = self.take(PeerUp(Role.EXECUTOR, 1))
        for i in range(n):
            pending += self.take(enqueue(i))
        while pending:
            message = pending.pop(0)
            answers = self.kv.apply(1, message) if isinstance(message, Match | StepPlan) else None
            if answers is not None:
                for out in answers.messages:
                    if out.role is Role.SCHEDULER:
                        pending += self.take(out.message)
                if isinstance(message, StepPlan):
                    self.plan = message
                    if len(message.slot) == n and (message.kind == Kind.DECODE).all():
                        return
                    pending += self.take(self.result(message))

    def take(self, message: object) -> list[object]:
        return [o.message for o in self.scheduler.apply(time.monotonic_ns(), message).messages]  # type: ignore[arg-type]

    def result(self, plan: StepPlan) -> StepResult:
        decode = plan.kind == Kind.DECODE
        known = [self.lengths.get(s, PROMPT) for s in plan.slot.tolist()]
        done = np.where(decode, True, plan.start_or_cap + plan.n == PROMPT)
        for slot, finished in zip(plan.slot.tolist(), done.tolist(), strict=True):
            if finished:
                self.lengths[slot] = self.lengths.get(slot, PROMPT) + 1
        n_new = done.astype(np.int32)
        return StepResult(
            plan.step,
            plan.slot,
            plan.open_id,
            n_new,
            col([7] * int(n_new.sum())),
            col(known),
            started_ns=0,
            finished_ns=0,
        )

    def step(self) -> None:
        result = self.result(self.plan)
        before = time.thread_time_ns()
        answers = self.take(result)
        spent = time.thread_time_ns() - before
        self.take_ns.append(spent - self.plan_ns[-1])
        (self.plan,) = (m for m in answers if isinstance(m, StepPlan))
        objects = sys.getallocatedblocks()
        before = time.thread_time_ns()
        outputs = self.kv.apply(1, self.plan)
        self.bind_ns.append(time.thread_time_ns() - before)
        self.objects.append(sys.getallocatedblocks() - objects)
        for out in outputs.messages:
            if isinstance(out.message, StepAck):
                self.take(out.message)


def step_costs() -> list[str]:
    rows = [
        "| running | plan µs | bind µs | plan + bind µs | take µs | objects made by bind |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for n in (1, 32, 256, 1024):
        loop = Loop(n)
        gc.collect()
        gc.disable()
        for _ in range(WARM_UP + STEPS):
            loop.step()
        gc.enable()
        plan, bind, take = (statistics.median(c[-STEPS:]) / 1000 for c in (loop.plan_ns, loop.bind_ns, loop.take_ns))
        objects = statistics.median(loop.objects[-STEPS:])
        rows.append(f"| {n} | {plan:.0f} | {bind:.0f} | {plan + bind:.0f} | {take:.0f} | {objects:.0f} |")
    return rows


def match_costs() -> list[str]:
    rows = ["| prompt tokens | cached blocks in the tree | match µs |", "|--:|--:|--:|"]
    for cached in (1_000, 100_000):
        host = PolicyHost(load_policies(PolicyConfig()))
        kv = KvCore(total_blocks=cached + 8, block_size=BLOCK_SIZE, slots=1, eviction=host, generation=1)
        key, parent = b"", -1
        for i in range(cached):  # one long prefix: the deepest tree there can be
            tokens = col(np.arange(BLOCK_SIZE) + i).tobytes()
            key = chain_key(key, tokens)
            parent = kv.pool.insert(kv.pool.allocate(), key, parent, tokens)
        for prompt in (128, 1024, 8192):
            ids = col(np.concatenate([np.arange(BLOCK_SIZE) + i for i in range(prompt // BLOCK_SIZE)]))
            times = []
            for _ in range(50):
                before = time.thread_time_ns()
                kv.apply(0, Match(1, b"", ids, len(ids)))
                times.append(time.thread_time_ns() - before)
            rows.append(f"| {prompt} | {cached} | {statistics.median(times) / 1000:.0f} |")
    return rows


def main() -> None:
    text = "\n".join(
        ["# Cost of the kernel", "", f"Block size {BLOCK_SIZE}, medians of {STEPS} steps.", "", *step_costs(), "",
         "Matching a prompt that is wholly in the tree:", "", *match_costs(), ""]
    )  # fmt: skip
    print(text)
    (Path(__file__).parents[1] / "results" / "kernel_cost.md").write_text(text)


if __name__ == "__main__":
    main()
