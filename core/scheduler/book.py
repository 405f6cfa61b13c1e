"""Which requests exist and where each of their sequences is: waiting, in a slot, or done. All moves are made here.

Knows nothing of steps or of peers; what it has to tell goes into the outbox.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from octavo.core.machine import Outbound
from octavo.core.messages import Match, Matched, Message, Refused, Role, col
from octavo.core.policy.observations import Observations
from octavo.core.scheduler.room import Room
from octavo.core.scheduler.rows import Rows
from octavo.core.scheduler.sequence import Request, Sequence, State
from octavo.core.scheduler.waiting import Queue
from octavo.core.trace.catalogue import Event, RequestFailed, RequestFinished, RequestMatched

LOOKED_AT = 64
"""Waiting sequences that may be matched anew after a step."""


@dataclass(slots=True)
class Outbox:
    """What one call of the core has to say."""

    messages: list[Outbound] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def send(self, role: Role, message: Message) -> None:
        self.messages.append(Outbound(role, message))

    def send_rows(self, step: int, rows: Rows) -> None:
        if (message := rows.message(step)) is not None:
            self.send(Role.TOKENIZER, message)


class Book:
    """The requests by id, and the moves of their sequences between the queue, the slots and the end."""

    def __init__(self, queue: Queue, room: Room) -> None:
        self.queue = queue
        self.requests: dict[str, Request] = {}
        self.outbox = Outbox()
        self.observations = Observations()
        self.can_match = False
        """The KV-manager is there to answer."""
        self._room = room
        self._unmatched: dict[int, Sequence] = {}
        """Waiting sequences whose match is asked for, by seq_id."""
        self._alone: list[Sequence] = []
        """Waiting sequences that can no longer fork, and whose match is not asked for yet."""

    def ask_match(self, sequence: Sequence) -> None:
        """Its hint is unknown until the KV-manager answers."""
        if sequence.hint is not None:
            sequence.hint = None
            if sequence.state is State.WAITING:
                self.queue.changed(sequence)
        self._ask(sequence)

    def look_again(self, leader: Sequence, block_size: int) -> None:
        """Ask anew for the matches of the first that wait and would go on as `leader` does, by a block at least. What
        is known of them holds until the answer is here."""
        asked = leader.request.asked
        for sequence in islice(self.queue, LOOKED_AT):
            hint = sequence.hint
            if hint is None or sequence.fork_of is not None or sequence.seq_id in self._unmatched:
                continue
            end, request = hint + block_size, sequence.request
            if end >= len(sequence.tokens) or request.asked.namespace != asked.namespace or request.computes_prompt:
                continue
            if leader.tokens[hint:end] == sequence.tokens[hint:end]:
                self._ask(sequence)

    def ask_alone(self) -> None:
        """Ask for the matches of those whom their parent has left: what it has computed may enter the tree with the
        plan that releases it."""
        for sequence in self._alone:
            if sequence.state is State.WAITING and sequence.hint is None and sequence.seq_id not in self._unmatched:
                self._ask(sequence)
        self._alone.clear()

    def _ask(self, sequence: Sequence) -> None:
        self._unmatched[sequence.seq_id] = sequence
        if self.can_match:
            request = sequence.request
            match = Match(sequence.seq_id, request.asked.namespace, col(sequence.tokens), request.prompt_len)
            self.outbox.send(Role.KV, match)

    def ask_all_matches(self) -> None:
        """The KV-manager is there (again): ask for everyone who waits on its own account."""
        self.can_match = True
        for sequence in self.queue:
            if sequence.fork_of is None:
                self.ask_match(sequence)

    def matched(self, answer: Matched) -> None:
        sequence = self._unmatched.pop(answer.seq, None)
        if sequence is None or sequence.state is not State.WAITING:
            return
        computes = sequence.request.computes_prompt
        known, sequence.hint = sequence.hint, 0 if computes else min(answer.cached, len(sequence.tokens) - 1)
        if sequence.hint == known:
            return
        self.queue.changed(sequence)
        self.outbox.events.append(
            RequestMatched(
                request_id=sequence.request.id,
                choice=sequence.choice,
                cached=sequence.hint,
                swapped=0 if computes else answer.swapped,
                known=len(sequence.tokens),
                miss="computed" if computes and answer.cached else answer.miss,
                at=answer.at,
                evicted_ns=answer.evicted_ns,
            )
        )

    def readdress(self, request: Request) -> None:
        """Its way to its client is another one now: the next token of each choice has to be looked at."""
        for sequence in request.sequences:
            if sequence.slot >= 0:
                self._room.slots.plain[sequence.slot] = False

    def requeue(self, sequence: Sequence) -> None:
        """Back from its slot to waiting, to be opened anew from its tokens."""
        self._room.release(sequence.slot)
        sequence.state, sequence.slot = State.WAITING, -1
        self.queue.add(sequence)
        self.ask_match(sequence)

    def finish(self, now_ns: int, sequence: Sequence, reason: str, detail: str = "", rows: Rows | None = None) -> None:
        """The choice has ended; `rows`, if given, tell its client so."""
        request = sequence.request
        self.leave(sequence)
        sequence.finish = reason
        if sequence.first_ns and reason in ("stop", "length"):
            self.observations.finished(
                tenant=request.tenant,
                prompt=request.prompt_len,
                output=sequence.outputs,
                preemptions=sequence.preemptions,
                ttft_ns=sequence.first_ns - request.arrival_ns,
                total_ns=now_ns - request.arrival_ns,
            )
        if rows is not None:
            rows.end(sequence, reason, detail, now_ns)
        self.outbox.events.append(
            RequestFinished(
                request_id=request.id,
                choice=sequence.choice,
                finish=reason,
                detail=detail,
                prompt_tokens=request.prompt_len,
                output_tokens=sequence.outputs,
                cached=max(0, sequence.cached),
                dropped=sequence.dropped,
                preemptions=sequence.preemptions,
                since_queued_ns=now_ns - request.arrival_ns,
                drafted=sequence.drafted,
                accepted=sequence.accepted,
            )
        )

    def leave(self, sequence: Sequence) -> None:
        """Out of the slot or the queue, for good; those that wait to share its prompt go the ordinary way."""
        if sequence.state is State.RESIDENT:
            self._room.release(sequence.slot)
            sequence.slot = -1
        elif sequence.state is State.WAITING:
            self.queue.remove(sequence)
            self._unmatched.pop(sequence.seq_id, None)
        sequence.state = State.DONE
        for other in sequence.request.sequences:
            if other.fork_of is sequence:
                other.fork_of = None
                if other.state is State.WAITING:
                    self._alone.append(other)

    def drop(self, now_ns: int, request: Request, why: str) -> None:
        """Nobody wants it any more."""
        for sequence in reversed(request.sequences):  # parents last: nobody is matched in vain
            if sequence.state is not State.DONE:
                self.finish(now_ns, sequence, "cancelled", why)
        del self.requests[request.id]

    def refuse(self, request: Request, reason: str, code: str) -> None:
        """It will not be served. Only for a request that has produced nothing and holds no slot."""
        for sequence in reversed(request.sequences):
            self.leave(sequence)
        del self.requests[request.id]
        self.outbox.events.append(RequestFailed(request_id=request.id, code=code, reason=reason))
        if not request.orphan:
            self.outbox.send(Role.TOKENIZER, Refused(request.id, request.attempt, "deadline_ns", reason, code))

    def forget_if_done(self, request: Request) -> None:
        """A request that ended while its client had no way to hear of it is kept until it is resumed."""
        if request.done and not request.orphan:
            self.requests.pop(request.id, None)


def finish_reason(sequence: Sequence) -> str:
    """Why the sequence ends with its last token, or "" if it goes on."""
    if len(sequence.tokens) > sequence.request.prompt_len and sequence.tokens[-1] in sequence.request.stop_ids:
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.request.limit else ""
