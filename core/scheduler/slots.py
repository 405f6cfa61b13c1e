"""The resident sequences as columns by slot: what a step is planned from.

Lengths of a resident sequence, in tokens:

    0 ────────── planned ───── known ───────── known + in flight (at most) ─── limit
      KV computed or planned     │ sampled by steps whose results are not here yet
                                 └ tokens the scheduler knows

Knows nothing of blocks' ids, of messages or of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from octavo.core.messages import Col
from octavo.core.scheduler.guesses import Guesses
from octavo.policies.contract import Ints, Mask, Running, Times

if TYPE_CHECKING:
    from octavo.core.scheduler.sequence import Sequence


SlotIds: TypeAlias = np.ndarray[tuple[int], np.dtype[np.intp]]
"""Slots, as an index into the columns."""


OF_RESIDENCY = ("arrival_ns", "prompt", "priority", "deadline_ns", "tenant", "preemptions", "cached")
"""Columns of a view that do not change as long as the same sequences are resident."""


class Slots:
    """`count` slots. Columns have shape [count]; rows of free slots are meaningless but `open_id` (-1) and `active`."""

    def __init__(self, count: int, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))
        self.active: Mask = np.zeros(count, dtype=np.bool_)
        self.open_id: Col = np.full(count, -1, dtype=np.int32)
        self.known: Col = np.zeros(count, dtype=np.int32)
        self.planned: Col = np.zeros(count, dtype=np.int32)
        self.prompt: Col = np.zeros(count, dtype=np.int32)
        self.limit: Col = np.zeros(count, dtype=np.int32)
        self.in_flight: Col = np.zeros(count, dtype=np.int32)
        """Tokens that the items in flight surely yield, unless the sequence ends: one for each round that samples."""
        self.in_flight_most: Col = np.zeros(count, dtype=np.int32)
        """Most tokens that the items in flight yield together."""
        self.blocks: Col = np.zeros(count, dtype=np.int32)
        """Blocks held or promised by debits."""
        self.decoding: Mask = np.zeros(count, dtype=np.bool_)
        """All known tokens at its opening are planned; it goes on from its own last token."""
        self.rebase_fence: Col = np.zeros(count, dtype=np.int32)
        """Rebases by steps up to this one are already taken into account."""
        self.planned_in: Col = np.zeros(count, dtype=np.int32)
        """Step of its latest chunk."""
        self.arrival_ns: Times = np.zeros(count, dtype=np.int64)
        self.order: Times = np.zeros(count, dtype=np.int64)
        self.priority: Ints = np.zeros(count, dtype=np.int32)
        self.deadline_ns: Times = np.zeros(count, dtype=np.int64)
        self.tenant: Ints = np.zeros(count, dtype=np.int32)
        self.preemptions: Ints = np.zeros(count, dtype=np.int32)
        self.cached: Ints = np.zeros(count, dtype=np.int32)
        """Tokens that it started with: from the prefix tree, or its parent's."""
        self.left_out: Ints = np.zeros(count, dtype=np.int32)
        """Steps in a row in which the batching policy let it not decode."""
        self.committed: Col = np.zeros(count, dtype=np.int32)
        """Tokens that the KV-manager knows."""
        self.plain: Mask = np.zeros(count, dtype=np.bool_)
        """Its next tokens, unless they end the sequence, only have to be passed on, as `row` says."""
        self.row: Col = np.zeros((6, count), dtype=np.int32)
        """What the next row of Deltas says of it: handle, choice, attempt, index, (tokens,) cached."""
        self.guesses = Guesses(count)
        self._oldest_first: SlotIds | None = None
        self._viewed: SlotIds | None = None
        """Whom the last view showed."""
        self._kept: dict[str, Any] = {}
        """Its columns `OF_RESIDENCY`."""

    @property
    def running(self) -> int:
        return len(self.sequences) - len(self.free)

    def blocks_for(self, tokens: Col) -> Col:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def take(self, sequence: Sequence, open_id: int, planned: int) -> int:
        """Give the sequence a slot, starting with `planned` tokens that need not be computed."""
        slot = self.free.pop()
        self._oldest_first = None
        request = sequence.request
        self.sequences[slot] = sequence
        self.active[slot] = True
        self.open_id[slot] = open_id
        self.known[slot] = self.committed[slot] = len(sequence.tokens)
        self.planned[slot] = self.cached[slot] = planned
        self.prompt[slot] = request.prompt_len
        self.limit[slot] = request.limit
        self.in_flight[slot] = self.in_flight_most[slot] = self.blocks[slot] = 0
        self.rebase_fence[slot] = self.planned_in[slot] = self.left_out[slot] = 0
        self.decoding[slot] = self.plain[slot] = False
        self.arrival_ns[slot] = request.arrival_ns
        self.order[slot] = request.order
        self.priority[slot] = request.asked.priority
        self.deadline_ns[slot] = deadline(request.asked.deadline_ns)
        self.tenant[slot] = request.tenant
        self.preemptions[slot] = sequence.preemptions
        self.guesses.forget(slot)
        return slot

    def leave(self, slot: int) -> None:
        """Free the slot for the next plan."""
        self._oldest_first = None
        self.sequences[slot] = None
        self.active[slot] = self.decoding[slot] = False
        self.open_id[slot] = -1
        self.free.append(slot)

    @property
    def oldest_first(self) -> SlotIds:
        """The active slots in order of arrival."""
        if self._oldest_first is None:
            slots = np.flatnonzero(self.active)
            self._oldest_first = slots[np.lexsort((slots, self.order[slots], self.arrival_ns[slots]))]
        return self._oldest_first

    def view(self, slots: SlotIds) -> Running:
        """What policies see of these slots, in this order; copies, so that nothing can be changed through it."""
        if slots is not self._viewed:
            self._viewed = slots
            for name in OF_RESIDENCY:
                column = getattr(self, name)[slots]
                self._kept[name] = np.frombuffer(column.tobytes(), column.dtype)  # nobody can make these writeable
        known = self.known[slots]
        moving: dict[str, Any] = {
            "known": known,
            "planned": self.planned[slots],
            "output_left": self.limit[slots] - known,
            "blocks": self.blocks[slots],
            "decoding": self.decoding[slots],
            "judged": self.guesses.judged[slots],
            "right": self.guesses.right[slots],
        }
        for column in moving.values():
            column.flags.writeable = False
        return Running(**self._kept, **moving)


NO_DEADLINE = np.iinfo(np.int64).max


def deadline(deadline_ns: int | None) -> int:
    """A deadline as a column holds it."""
    return int(NO_DEADLINE) if deadline_ns is None else deadline_ns
