"""Who gets a slot: by opening anew, or by forking from a resident sequence of the same request.

Whether there is credit for it is decided here, whatever a policy says; so is that a suspect runs alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.messages import Fork, Open, col
from octavo.core.scheduler.draft import Draft, blocks_for
from octavo.core.scheduler.room import Room
from octavo.core.scheduler.sequence import Sequence, State
from octavo.core.scheduler.slots import Slots
from octavo.core.scheduler.waiting import Queue
from octavo.core.trace.catalogue import RequestAdmitted, RequestBlocked


class Admission:
    """Moves sequences from the queue into slots."""

    def __init__(self, slots: Slots, queue: Queue, room: Room) -> None:
        self._slots = slots
        self._queue = queue
        self._room = room
        self._open_id = 0

    def admissible(self, draft: Draft, candidates: list[Sequence], when_blocked: str) -> list[Sequence]:
        """Who may take a slot now, as far as slots go. A suspect runs alone."""
        if not candidates:
            return []
        running = self._slots.running
        resident = [s for s in self._slots.sequences if s is not None] if running else []
        if any(s.suspect for s in resident):
            draft.refused[candidates[0]] = ("suspect", 1, 0)
            return []
        admissible: list[Sequence] = []
        for sequence in candidates:
            if len(admissible) == len(self._slots.free):
                if not admissible:  # else it waits behind those, whatever becomes of them
                    draft.refused[sequence] = ("slots", 1, 0)
                break
            if sequence.suspect:
                if not running and not admissible:
                    return [sequence]
                draft.refused[sequence] = ("suspect", 1, 0)
                continue
            if self.ready(draft, sequence):
                admissible.append(sequence)
                continue
            draft.refused[sequence] = ("match" if sequence.fork_of is None else "parent", 1, 0)
            if sequence.fork_of is None and when_blocked == "stop":
                break
        return admissible

    def ready(self, draft: Draft, sequence: Sequence) -> bool:
        """Its match is known; or its parent's prompt is computed, so that it can fork: had that failed, it would read
        what is not there."""
        parent = sequence.fork_of
        if parent is None:
            return sequence.hint is not None
        slot = parent.slot
        return (
            slot >= 0
            and int(self._slots.planned[slot]) >= sequence.request.prompt_len
            and int(self._slots.planned_in[slot]) <= draft.taken
        )

    def left(self, sequence: Sequence) -> int:
        """Tokens that it will have to compute."""
        return len(sequence.tokens) - self.start(sequence)

    @staticmethod
    def start(sequence: Sequence) -> int:
        """Tokens that it will not have to compute."""
        return sequence.request.prompt_len - 1 if sequence.fork_of is not None else sequence.hint or 0

    def admit(self, draft: Draft, sequence: Sequence, n: int) -> bool:
        """Give it a slot and its first chunk, if there is credit for its whole prompt beside what the running ones
        still need (alone, only for its chunk)."""
        slots, start = self._slots, self.start(sequence)
        parent = sequence.fork_of
        shared = start // slots.block_size if parent is not None else 0
        need = blocks_for(start + n, slots.block_size) - shared
        whole = blocks_for(len(sequence.tokens) + 1, slots.block_size) - shared
        if need > draft.credit or (slots.running and whole + self._room.promised() > draft.credit):
            draft.refused[sequence] = ("blocks", whole + self._room.promised(), draft.credit)
            return False
        self._open_id += 1
        slot = slots.take(sequence, self._open_id, start)
        request = sequence.request
        if parent is not None:
            fork = Fork(
                slot,
                self._open_id,
                parent.slot,
                parent.open_id,
                start,
                col(sequence.tokens[start:]),
                request.prompt_len,
                sequence.choice,
                request.asked.sampling,
            )
            draft.forks.append(fork)
            slots.blocks[slot] = shared
        else:
            opening = Open(
                slot,
                self._open_id,
                col(sequence.tokens),
                request.prompt_len,
                start,
                sequence.choice,
                request.asked.sampling,
                request.asked.namespace,
                request.asked.tenant,
                request.asked.keep_ns,
                request.asked.adapter,
            )
            draft.opens.append(opening)
        self._queue.remove(sequence)
        sequence.state, sequence.slot, sequence.open_id = State.RESIDENT, slot, self._open_id
        sequence.blocked = ""
        sequence.admitted_ns = sequence.admitted_ns or draft.now_ns
        if sequence.cached < 0:
            sequence.cached = start
        draft.events.append(
            RequestAdmitted(
                request_id=request.id,
                choice=sequence.choice,
                step=draft.step,
                slot=slot,
                open_id=self._open_id,
                how="open" if parent is None else "fork",
                cached=start,
                waited_ns=draft.now_ns - sequence.queued_ns,
            )
        )
        sequence.fork_of = None
        return True

    def blocked(self, draft: Draft, otherwise: str) -> Iterator[RequestBlocked]:
        """Why those wait that were asked for and refused, or why the first one was not asked for; each reason once."""
        first = self._queue.first
        if first is not None and not draft.refused:
            draft.refused[first] = ("slots", 1, 0) if not self._slots.free else (otherwise, 0, 0)
        for sequence, (resource, need, have) in draft.refused.items():
            if sequence.state is State.WAITING and sequence.blocked != resource:
                sequence.blocked = resource
                yield RequestBlocked(
                    request_id=sequence.request.id,
                    choice=sequence.choice,
                    step=draft.step,
                    resource=resource,
                    need=need,
                    have=have,
                )
