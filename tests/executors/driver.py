"""A scheduler and a KV-manager in a few lines, without their cleverness: the test says what each step does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from octavo.core.messages import (
    EMPTY,
    Adapter,
    Fork,
    Kind,
    Open,
    Sampling,
    StepBind,
    StepPlan,
    StepResult,
    TokenLogprob,
    col,
)
from octavo.executors.base import Executor

GREEDY = Sampling(temperature=0.0)
DECODE = 0
"""In place of a chunk's length."""


@dataclass(eq=False)
class Sequence:
    slot: int
    open_id: int
    ids: list[int]
    prompt_len: int
    sampling: Sampling
    kv_len: int = 0
    table: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    failure: str | None = None

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_len :]

    @property
    def left(self) -> int:
        """Known tokens that are not computed."""
        return len(self.ids) - self.kv_len


class Driver:
    """Runs steps of an executor. Blocks are given out in random order, so that no test depends on neighbours."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.size = executor.facts.block_size
        self.free = list(range(executor.facts.total_blocks))
        random.Random(seed).shuffle(self.free)
        self.last: StepResult | None = None
        self._steps = 0
        self._opened: list[Sequence] = []
        self._opens: list[Open] = []
        self._forks: list[Fork] = []
        self._copies: list[tuple[int, int]] = []
        self._released: list[Sequence] = []
        self._slots = 0
        executor.forget()

    def open(
        self,
        ids: list[int],
        *,
        prompt_len: int | None = None,
        sampling: Sampling = GREEDY,
        choice: int = 0,
        warm: Sequence | None = None,
        adapter: Adapter | None = None,
    ) -> Sequence:
        """A residency from the next step on. `warm` lends its full blocks as far as its tokens are the same."""
        sequence = self._sequence(ids, len(ids) if prompt_len is None else prompt_len, sampling)
        if warm is not None:
            same = next(
                (i for i, (a, b) in enumerate(zip(ids, warm.ids, strict=False)) if a != b), min(len(ids), len(warm.ids))
            )
            blocks = min(same, warm.kv_len, len(ids) - 1) // self.size
            sequence.table, sequence.kv_len = warm.table[:blocks], blocks * self.size
        opening = Open(
            sequence.slot, sequence.open_id, col(ids), sequence.prompt_len, sequence.kv_len, choice, sampling, b""
        )
        self._opens.append(msgspec.structs.replace(opening, adapter=adapter))
        return sequence

    def fork(
        self, parent: Sequence, n: int, ids: list[int], *, sampling: Sampling = GREEDY, choice: int = 0
    ) -> Sequence:
        """A child of the parent's first `n` tokens: full blocks shared, the tail copied."""
        child = self._sequence(parent.ids[:n] + ids, parent.prompt_len, sampling)
        full = n // self.size
        child.table, child.kv_len = parent.table[:full], n
        if n % self.size:
            child.table = [*child.table, self.free.pop()]
            self._copies.append((parent.table[full], child.table[full]))
        self._forks.append(
            Fork(
                child.slot, child.open_id, parent.slot, parent.open_id, n, col(ids), child.prompt_len, choice, sampling
            )
        )
        return child

    def release(self, sequence: Sequence) -> None:
        self._released.append(sequence)

    def step(self, *work: tuple[Sequence, int], rounds: int = 1) -> StepResult:
        """Compute so many tokens of each, or `DECODE`; of several rounds where all do."""
        deltas: list[tuple[int, int, int]] = []
        opened = [(s, list(s.table), s.kv_len) for s in self._opened]
        for sequence, n in work:
            end = sequence.kv_len + n if n else len(sequence.ids) + rounds - 1
            while len(sequence.table) * self.size < end:
                deltas.append((sequence.slot, len(sequence.table), self.free.pop()))
                sequence.table.append(deltas[-1][2])
        plan = StepPlan(
            0,
            self._steps,
            0,
            EMPTY,
            EMPTY,
            EMPTY,
            EMPTY,
            EMPTY,
            col([s.slot for s in self._released]),
            col([s.open_id for s in self._released]),
            self._opens,
            self._forks,
            col([s.slot for s, _ in work]),
            col([s.open_id for s, _ in work]),
            col([Kind.CHUNK if n else Kind.DECODE for _, n in work]),
            col([s.kv_len if n else len(s.ids) + rounds - 1 for s, n in work]),
            col([n or rounds for _, n in work]),
            self._steps - 1,
            [],
            rounds=rounds,
        )
        bind = StepBind(
            0,
            self._steps,
            col([s.slot for s, _, _ in opened]),
            col([s.open_id for s, _, _ in opened]),
            col([0] * len(opened)),
            col([kv_len for _, _, kv_len in opened]),
            col([len(table) for _, table, _ in opened]),
            col([block for _, table, _ in opened for block in table]),
            col([slot for slot, _, _ in deltas]),
            col([0] * len(deltas)),
            col([index for _, index, _ in deltas]),
            col([block for _, _, block in deltas]),
            col([source for source, _ in self._copies]),
            col([target for _, target in self._copies]),
            EMPTY,
        )
        self._opened, self._opens, self._forks, self._copies, self._released = [], [], [], [], []
        self._steps += 1
        result = self.executor.execute(plan, bind)
        self._take(result, [s for s, _ in work])
        return result

    def finish(self, sequence: Sequence, new: int, chunk: int | None = None) -> list[int]:
        """Run alone until it has `new` output tokens, prefilling `chunk` tokens at a time; gives them."""
        while len(sequence.output) < new and sequence.failure is None:
            self.advance([sequence], chunk)
        return sequence.output[:new]

    def advance(self, sequences: list[Sequence], chunk: int | None = None) -> None:
        """One step for all: a chunk for those with a prompt left, a decode for the others."""
        work = [
            (s, DECODE if s.left == 1 and s.kv_len and s.output else min(s.left, chunk or s.left)) for s in sequences
        ]
        self.step(*work)

    def _sequence(self, ids: list[int], prompt_len: int, sampling: Sampling) -> Sequence:
        sequence = Sequence(self._slots, self._slots + 1000, list(ids), prompt_len, sampling)
        self._slots += 1
        self._opened.append(sequence)
        return sequence

    def _take(self, result: StepResult, sequences: list[Sequence]) -> None:
        self.last = result
        by_id = {s.open_id: s for s in sequences}
        at = 0
        for slot, open_id, n, kv_len in zip(result.slot, result.open_id, result.n_new, result.kv_len, strict=True):
            sequence = by_id[int(open_id)]
            assert sequence.slot == slot
            sequence.ids += result.tokens[at : at + n].tolist()
            if result.logprobs is not None:
                sequence.logprobs += result.logprobs[at : at + n]
            sequence.kv_len = int(kv_len)
            at += n
        for failed in result.failed:
            by_id[failed.open_id].failure = failed.reason
