"""Who gives way: sends sequences back to waiting when blocks run short, or when a batching policy asks for room.

What is kept here whatever a policy says: the oldest resident sequence is never sent back for want of blocks, and nobody
too often for a batching policy's sake.
"""

from __future__ import annotations

import numpy as np

from octavo.core.policy import PolicyHost
from octavo.core.policy.rules import MAX_SENT_BACK
from octavo.core.scheduler.credit import Ledger
from octavo.core.scheduler.draft import Draft, blocks_for
from octavo.core.scheduler.sequence import Sequence, State
from octavo.core.scheduler.slots import SlotIds, Slots
from octavo.core.scheduler.waiting import Queue
from octavo.core.trace.catalogue import RequestPreempted
from octavo.policies.contract import Mask, Step


class Room:
    """Releases of slots that the next plan must tell the KV-manager, by whatever cause."""

    def __init__(
        self,
        slots: Slots,
        queue: Queue,
        ledger: Ledger,
        host: PolicyHost,
        *,
        chunk_budget: int,
        depth: int,
        swaps: bool,
    ) -> None:
        self.releases: list[tuple[int, int, int]] = []
        """(slot, open_id, blocks) to release with the next plan."""
        self.sent_back: list[Sequence] = []
        """Preempted since the core last looked: they need a new match."""
        self.preemptions = 0
        self.slots = slots
        self._queue = queue
        self._ledger = ledger
        self._host = host
        self._chunk_budget = chunk_budget
        self._depth = depth
        self._swaps = swaps

    def release(self, slot: int) -> None:
        """The slot's sequence leaves it; the KV-manager hears of it with the next plan."""
        self.releases.append((slot, int(self.slots.open_id[slot]), int(self.slots.blocks[slot])))
        self.slots.leave(slot)

    def promised(self) -> int:
        """Blocks that the running ones may still ask for: the rest of their prompts, and a growth for each step
        that can be under way."""
        slots = self.slots
        active = slots.oldest_first
        ahead = np.minimum(slots.known[active] + slots.in_flight_most[active] + self._depth, slots.limit[active])
        return int(np.maximum(0, slots.blocks_for(ahead) - slots.blocks[active]).sum())

    def preempt(self, draft: Draft, step: Step, running: SlotIds, wants: Mask) -> list[int]:
        """Send sequences back to waiting if the credit will not last for `depth` more steps."""
        slots = self.slots
        if len(running) < 2:
            return []
        # Most that a decode can ask for; with credit for that the exact count is not needed.
        growth = (int(slots.in_flight_most[running].max()) + self._depth) // slots.block_size + 2
        if draft.credit >= growth * len(running) and slots.decoding[running].all():
            return []
        short = self._shortage(draft, running, wants)
        if short <= 0:
            return []
        candidates = running[1:]  # the oldest always gets on
        gone: list[int] = []
        for i in self._host.victims(step, short, self.slots.view(candidates)).tolist():
            slot = int(candidates[i])
            short -= int(self.slots.blocks[slot])
            gone.append(slot)
            self._send_back(draft, slot, short, self._neediest(running[~np.isin(running, gone)]))
            left = ~np.isin(running, gone)
            if short <= 0 or self._shortage(draft, running[left], wants[left]) <= 0:
                break
        return gone

    def make(self, draft: Draft, named: SlotIds, first: Sequence) -> list[int]:
        """Send back whom a policy names, as many as the `first` candidate needs; nobody if all would not do."""
        if first.suspect:
            return []
        slots = self.slots
        need = blocks_for(len(first.tokens) + 1, slots.block_size) + self.promised()
        have = draft.credit + self._ledger.coming + sum(blocks for _, _, blocks in self.releases)
        if slots.free and need <= have:
            return []
        gone: list[int] = []
        for slot in named.tolist():
            if slots.preemptions[slot] < MAX_SENT_BACK:
                gone.append(slot)
                have += int(slots.blocks[slot])
                if need <= have:
                    break
        else:
            return []
        for slot in gone:
            self._send_back(draft, slot, max(0, need - draft.credit), first.request.id)
        return gone

    def _shortage(self, draft: Draft, running: SlotIds, wants: Mask) -> int:
        """Blocks by which credit and releases under way fall short of what the running ones need soon."""
        slots = self.slots
        known, planned = slots.known[running], slots.planned[running]
        ahead = np.minimum(known + slots.in_flight_most[running] + self._depth, slots.limit[running])
        chunk = np.minimum(known, planned + self._chunk_budget)
        soon = np.where(slots.decoding[running], np.where(wants, ahead, 0), chunk)
        need = np.maximum(0, slots.blocks_for(soon) - slots.blocks[running])
        freed = sum(blocks for _, _, blocks in self.releases)
        return int(need.sum()) - draft.credit - self._ledger.coming - freed

    def _neediest(self, running: SlotIds) -> str:
        """The request of these that is short of most blocks, for the next tokens it knows or may get."""
        slots = self.slots
        ahead = slots.known[running] + slots.in_flight_most[running] + self._depth
        need = slots.blocks_for(ahead) - slots.blocks[running]
        sequence = slots.sequences[int(running[int(need.argmax())])]
        return sequence.request.id if sequence is not None else ""

    def _send_back(self, draft: Draft, slot: int, need: int, by: str) -> None:
        sequence = self.slots.sequences[slot]
        assert sequence is not None  # the slot is active
        sequence.preemptions += 1
        self.preemptions += 1
        draft.events.append(
            RequestPreempted(
                request_id=sequence.request.id,
                choice=sequence.choice,
                step=draft.step,
                mode="swap" if self._swaps else "recompute",
                lost=int(self.slots.planned[slot]),
                need_blocks=need,
                credit=draft.credit,
                by=by,
            )
        )
        self.release(slot)
        sequence.slot = -1
        sequence.state = State.WAITING
        sequence.queued_ns = draft.now_ns
        sequence.hint = None
        self._queue.add(sequence)
        self.sent_back.append(sequence)
