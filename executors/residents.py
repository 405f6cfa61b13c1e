"""Who is resident on an executor: tokens, lengths and block tables by slot, kept from plans and binds.

Shared by every executor, so that they agree on what a bound step means. Knows no KV bytes, no model and no
sampling: it turns (StepPlan, StepBind) into *runs*, and is told what was sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from octavo.core.messages import Adapter, Col, Kind, Sampling, StepBind, StepPlan, col

_KV_LEN = attrgetter("kv_len")
_CHUNK = int(Kind.CHUNK)  # an enum's member takes longer to find than all else that a row needs


@dataclass(slots=True, eq=False, weakref_slot=True)
class Resident:
    """A sequence in a slot.

    `tokens` are all its known ids, sampled ones included; the KV of the first `kv_len` is in the blocks of
    `table` (block i holds positions [i·B, (i+1)·B))."""

    open_id: int
    tokens: list[int]
    prompt_len: int
    choice: int
    sampling: Sampling
    kv_len: int = 0
    table: array[int] = field(default_factory=partial(array, "i"))
    namespace: bytes = b""
    """Of its tenant and adapter: what is learnt from it may serve only residents of the same one."""
    adapter: Adapter | None = None
    vetted: bool = False
    """Whether somebody has seen that its given tokens and its adapter can be computed."""

    @property
    def unknown(self) -> bool:
        """Whether its last token is on the device alone: in `tokens` a number below 0 stands for it."""
        return self.tokens[-1] < 0

    @property
    def ended(self) -> bool:
        """Whether its last token is an output after which nothing comes."""
        return self.tokens[-1] in self.sampling.ends and len(self.tokens) > self.prompt_len


class Run(NamedTuple):
    """One item to compute: tokens [start, end) of a resident, then sample if `samples`.

    A decode may also draft `drafts` tokens; all its writes stay below position `capacity`."""

    slot: int
    resident: Resident
    start: int
    end: int
    samples: bool
    drafts: int
    capacity: int


@dataclass(frozen=True, slots=True, eq=False)
class Runs(Sequence[Run]):
    """The runs of a step, a column each: of hundreds a `Run` is made only of those who are looked at alone. `tables`
    are block tables by slot [slots, columns], zeros where there is no block; they are good until the next step."""

    slot: Col
    residents: list[Resident]
    start: Col
    end: Col
    samples: npt.NDArray[np.bool_]
    drafts: Col
    capacity: Col
    tables: npt.NDArray[np.int32]
    single: bool
    """Whether each is one token, and samples after it."""
    adapted: bool
    """Whether some may have adapters."""

    @classmethod
    def of(cls, runs: Iterable[Run], tables: npt.NDArray[np.int32]) -> Runs:
        slot, residents, start, end, samples, drafts, capacity = list(zip(*runs, strict=True)) or [()] * 7
        single = all(samples) and all(e - s == 1 for s, e in zip(start, end, strict=True))
        adapted = any(resident.adapter is not None for resident in residents)
        return cls(
            col(slot), list(residents), col(start), col(end), np.array(samples, np.bool_), col(drafts), col(capacity),
            tables, single, adapted,
        )  # fmt: skip

    def picked(self, which: Sequence[int]) -> Runs:
        """These of them; itself where that is all in their order."""
        if len(which) == len(self):
            return self
        at = np.array(which, dtype=np.int64)
        start, end, samples = self.start[at], self.end[at], self.samples[at]
        return Runs(
            self.slot[at],
            [self.residents[i] for i in which],
            start,
            end,
            samples,
            self.drafts[at],
            self.capacity[at],
            self.tables,
            self.single or bool((end - start == 1).all() and samples.all()),
            self.adapted,
        )

    def __len__(self) -> int:
        return len(self.residents)

    @overload
    def __getitem__(self, i: int) -> Run: ...

    @overload
    def __getitem__(self, i: slice) -> list[Run]: ...

    def __getitem__(self, i: int | slice) -> Run | list[Run]:
        if isinstance(i, slice):
            return list(self)[i]
        slot, start, end = int(self.slot[i]), int(self.start[i]), int(self.end[i])
        samples, drafts, capacity = bool(self.samples[i]), int(self.drafts[i]), int(self.capacity[i])
        return Run(slot, self.residents[i], start, end, samples, drafts, capacity)

    def __iter__(self) -> Iterator[Run]:
        rest = (self.start, self.end, self.samples, self.drafts, self.capacity)
        columns = (self.slot.tolist(), self.residents, *(column.tolist() for column in rest))
        return map(Run._make, zip(*columns, strict=True))


def slots_of(table: Sequence[int], cells: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """A pool's slots (block · block size + place in it) of a sequence's cells."""
    return np.asarray(table, dtype=np.int64)[cells // block_size] * block_size + cells % block_size


class Span(NamedTuple):
    """Tokens `ids` of a sequence whose block i of `table` has its cells [i · block size, (i + 1) · block size).

    Token i is at position start + i and its KV goes to the cell of that number, as of all tokens before. Not so in a
    tree: there a token's position is `start` and how many of the span's are before it, while cells are given out in any
    order. `paths[i]` are the cells of positions [start, its own] as token i sees them, its own cell last. A drafter's
    has no adapter: it guesses with the model itself."""

    ids: list[int]
    start: int
    table: Sequence[int]
    paths: Sequence[Sequence[int]] | None = None
    adapter: Adapter | None = None

    @property
    def end(self) -> int:
        """Past the last position of one that is no tree."""
        return self.start + len(self.ids)

    @property
    def positions(self) -> Sequence[int]:
        if self.paths is None:
            return range(self.start, self.end)
        return [self.start + len(path) - 1 for path in self.paths]

    @property
    def cells(self) -> Sequence[int]:
        """That the tokens' KV goes to."""
        return range(self.start, self.end) if self.paths is None else [path[-1] for path in self.paths]

    def alone(self, i: int) -> Span:
        """Token i, all before it being computed."""
        if self.paths is None:
            return Span([self.ids[i]], self.start + i, self.table, None, self.adapter)
        return Span([self.ids[i]], self.start, self.table, [self.paths[i]], self.adapter)


def span_of(run: Run, guesses: Iterable[int], parents: Sequence[int] | None = None) -> Span:
    """What one pass computes of a run: its own tokens, and the guesses for those after them. Guess i takes cell
    run.end + i; it comes after guess `parents[i]` (-1: after the run's own tokens), without parents after guess i - 1.
    """
    resident, own = run.resident, run.end - run.start
    ids = resident.tokens[run.start : run.end]
    ids += guesses
    if parents is None:
        return Span(ids, run.start, resident.table, None, resident.adapter)
    paths = [list(range(run.start, cell + 1)) for cell in range(run.start, run.end)]
    for i, parent in enumerate(parents):
        paths.append([*paths[own + parent], run.end + i])
    return Span(ids, run.start, resident.table, paths, resident.adapter)


def of_prompt(run: Run) -> range:
    """The positions of a run whose logits are about a token of the prompt, if its log-probabilities are asked for."""
    if run.resident.sampling.prompt_logprobs < 0:
        return range(0)
    return range(run.start, min(run.end, run.resident.prompt_len - 1))


class Residents:
    """The slots of an executor."""

    def __init__(self) -> None:
        self.slots: dict[int, Resident] = {}
        self._fence = (-1, -1)
        self._tables = np.zeros((0, 0), dtype=np.int32)
        """Those of the residents once more, by slot: for steps of many."""
        self._crowd: tuple[Col, list[Resident], list[list[int]], bool] | None = None
        """The slots that decoded last, who is in them, their tokens, and whether they have adapters, while nobody comes
        or goes."""

    def clear(self) -> None:
        self.slots.clear()
        self._crowd = None

    def adapters(self) -> set[bytes]:
        """Digests of those that are in use."""
        return {resident.adapter.digest for resident in self.slots.values() if resident.adapter is not None}

    def apply(self, plan: StepPlan, bind: StepBind) -> Runs:
        """Take a bound step and give its runs, in the order of the plan's items: of several rounds those of the first.

        The executor performs the bind's copies before it writes anything for the runs."""
        fence = (plan.scheduler_gen, bind.kv_gen)
        if fence != self._fence:  # a successor of either knows nothing of what was resident
            self.clear()
            self._fence = fence
        for slot, open_id in zip(plan.release_slot.tolist(), plan.release_open_id.tolist(), strict=True):
            if (resident := self.slots.get(slot)) is not None and resident.open_id == open_id:
                del self.slots[slot]
                self._crowd = None
        self._open(plan, bind)
        self._apply_deltas(bind.delta_slot, bind.delta_index, bind.delta_block)
        kinds, skipped = plan.kind.tolist(), set(bind.skipped.tolist())
        plain = _CHUNK not in kinds and not skipped
        n = plan.n if plan.rounds == 1 else np.ones_like(plan.n)  # each round says one token
        if plain and (runs := self._decodes(plan.slot, plan.start_or_cap, n)) is not None:
            return runs
        items = zip(plan.slot.tolist(), kinds, plan.start_or_cap.tolist(), n.tolist(), strict=True)
        each = (self._run(plan.step, *item) for i, item in enumerate(items) if i not in skipped)
        return Runs.of([run for run in each if run is not None], self._tables)

    def _decodes(self, slot: Col, capacity: Col, n: Col) -> Runs | None:
        """The runs of a step of nothing else, column by column: there may be hundreds, in every step. None if one is
        not as it should be, or has no room: it gets its own words."""
        if self._crowd is None or not np.array_equal(self._crowd[0], slot):
            crowd = [self.slots[each] for each in slot.tolist()]
            adapted = any(resident.adapter is not None for resident in crowd)
            self._crowd = slot, crowd, [resident.tokens for resident in crowd], adapted
        _, residents, tokens, adapted = self._crowd
        known = np.fromiter(map(len, tokens), np.int32, len(tokens))
        written = np.fromiter(map(_KV_LEN, residents), np.int32, len(tokens))
        start = known - 1
        if not (np.array_equal(written, start) and (known <= capacity).all()):
            return None
        drafts = np.minimum(n - 1, capacity - known)
        samples = np.ones(len(slot), np.bool_)
        return Runs(slot, residents, start, known, samples, drafts, capacity, self._tables, True, adapted)

    def _open(self, plan: StepPlan, bind: StepBind) -> None:
        opens = {o.open_id: o for o in plan.opens}
        forks = {f.open_id: f for f in plan.forks}
        at = 0
        for slot, open_id, length, n in zip(
            bind.opened_slot.tolist(),
            bind.opened_open_id.tolist(),
            bind.opened_len.tolist(),
            bind.opened_n.tolist(),
            strict=True,
        ):
            table = array("i", bind.opened_blocks[at : at + n].tolist())
            self._room(slot, n)
            self._tables[slot, :n], self._tables[slot, n:] = bind.opened_blocks[at : at + n], 0
            self._crowd = None
            at += n
            if (o := opens.get(open_id)) is not None:
                tokens, prompt_len, choice, sampling = o.ids.tolist(), o.prompt_len, o.choice, o.sampling
                namespace, adapter = o.namespace, o.adapter
            else:
                f = forks[open_id]
                parent = self.slots[f.parent_slot]
                tokens = parent.tokens[: f.n] + f.ids.tolist()
                namespace, adapter = parent.namespace, parent.adapter
                prompt_len, choice, sampling = f.prompt_len, f.choice, f.sampling
            self.slots[slot] = Resident(
                open_id,
                tokens,
                prompt_len,
                choice,
                sampling,
                kv_len=length,
                table=table,
                namespace=namespace,
                adapter=adapter,
            )

    def _room(self, slot: int, columns: int) -> None:
        """For tables of so many blocks in slots up to this one."""
        rows, width = self._tables.shape
        if slot >= rows or columns > width:
            bigger = np.zeros((max(rows, 2 * slot + 1), max(width, 2 * columns)), dtype=np.int32)
            bigger[:rows, :width] = self._tables
            self._tables = bigger

    def _apply_deltas(self, slots: Col, indices: Col, blocks: Col) -> None:
        if len(slots):
            self._room(int(slots.max()), int(indices.max()) + 1)
            self._tables[slots, indices] = blocks
        for slot, index, block in zip(slots.tolist(), indices.tolist(), blocks.tolist(), strict=True):
            table = self.slots[slot].table
            if index == len(table):
                table.append(block)
            else:
                table[index] = block

    def _run(self, step: int, slot: int, kind: int, at: int, n: int) -> Run | None:
        resident = self.slots[slot]
        known = len(resident.tokens)
        if kind == _CHUNK:
            if at != resident.kv_len or at + n > known:
                raise RuntimeError(
                    f"step {step}: chunk [{at}, {at + n}) of slot {slot}, "
                    f"which holds {resident.kv_len} of {known} tokens"
                )
            return Run(slot, resident, at, at + n, at + n == known, 0, at + n)
        if resident.kv_len != known - 1:
            raise RuntimeError(f"step {step}: decode of slot {slot}, which holds {resident.kv_len} of {known} tokens")
        if known > at:  # drafts of steps in flight took it past its end already: nothing may be written
            return None
        return Run(slot, resident, known - 1, known, True, min(n - 1, at - known), at)
