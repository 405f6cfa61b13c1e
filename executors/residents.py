"""Who is resident on an executor: tokens, lengths and block tables by slot, kept from plans and binds.

Shared by every executor, so that they agree on what a bound step means. Knows no KV bytes, no model and no
sampling: it turns (StepPlan, StepBind) into *runs*, and is told what was sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import gt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.core.messages import Adapter, Col, Kind, Sampling, StepBind, StepPlan

_DECODE = int(Kind.DECODE)
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
    unknown: int = 0
    """How many of its last tokens are on the device alone: in `tokens` numbers below 0 stand for them."""
    table: array[int] = field(default_factory=partial(array, "i"))
    namespace: bytes = b""
    """Of its tenant and adapter: what is learnt from it may serve only residents of the same one."""
    adapter: Adapter | None = None
    vetted: bool = False
    """Whether somebody has seen that its given tokens and its adapter can be computed."""


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

    def clear(self) -> None:
        self.slots.clear()

    def adapters(self) -> set[bytes]:
        """Digests of those that are in use."""
        return {resident.adapter.digest for resident in self.slots.values() if resident.adapter is not None}

    def apply(self, plan: StepPlan, bind: StepBind) -> list[Run]:
        """Take a bound step and give its runs, in the order of the plan's items.

        The executor performs the bind's copies before it writes anything for the runs."""
        fence = (plan.scheduler_gen, bind.kv_gen)
        if fence != self._fence:  # a successor of either knows nothing of what was resident
            self.slots.clear()
            self._fence = fence
        for slot, open_id in zip(plan.release_slot.tolist(), plan.release_open_id.tolist(), strict=True):
            if (resident := self.slots.get(slot)) is not None and resident.open_id == open_id:
                del self.slots[slot]
        self._open(plan, bind)
        self._apply_deltas(bind.delta_slot, bind.delta_index, bind.delta_block)
        kinds, skipped = plan.kind.tolist(), set(bind.skipped.tolist())
        if _CHUNK not in kinds and not skipped:
            return self._decodes(plan.step, plan.slot.tolist(), plan.start_or_cap.tolist(), plan.n.tolist())
        items = zip(plan.slot.tolist(), kinds, plan.start_or_cap.tolist(), plan.n.tolist(), strict=True)
        runs = (self._run(plan.step, *item) for i, item in enumerate(items) if i not in skipped)
        return [run for run in runs if run is not None]

    def _decodes(self, step: int, slots: list[int], caps: list[int], ns: list[int]) -> list[Run]:
        """The runs of a step of nothing else, column by column: there may be hundreds, in every step."""
        residents = [self.slots[slot] for slot in slots]
        known = [len(resident.tokens) for resident in residents]
        starts = [n - 1 for n in known]
        plain = [resident.kv_len for resident in residents] == starts and not any(map(gt, known, caps))
        if not plain:  # the one that is not gets its own words
            items = zip(slots, caps, ns, strict=True)
            runs = (self._run(step, slot, _DECODE, cap, n) for slot, cap, n in items)
            return [run for run in runs if run is not None]
        drafts = [0] * len(slots)
        if max(ns, default=1) > 1:
            drafts = [min(n - 1, cap - length) for n, cap, length in zip(ns, caps, known, strict=True)]
        everyone = [True] * len(slots)
        return list(map(Run._make, zip(slots, residents, starts, known, everyone, drafts, caps, strict=True)))

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

    def _apply_deltas(self, slots: Col, indices: Col, blocks: Col) -> None:
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
