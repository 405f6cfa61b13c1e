"""What clients ask of the scheduler, through the tokenizer: new requests, resumes, stops and cancels.

Refuses what could never be served, with the numbers; everything else is put into the book to wait.
"""

from __future__ import annotations

from itertools import count

from octavo.core.messages import Enqueue, Refused, Role, Stop
from octavo.core.scheduler.book import Book, finish_reason
from octavo.core.scheduler.rows import Rows
from octavo.core.scheduler.sequence import Request, Sequence, State
from octavo.core.scheduler.tenants import Tenants
from octavo.core.trace.catalogue import RequestFailed, RequestQueued, RequestResumed

ORPHAN_NS = 10_000_000_000
"""How long requests wait for their client to resume them after a tokenizer was lost."""


class NotServed(Exception):
    """A request that cannot be served: `field` is what is wrong with it, `code` why, for programs."""

    def __init__(self, field: str, reason: str, code: str) -> None:
        super().__init__(reason)
        self.field = field
        self.code = code


class Intake:
    """Takes requests into the book. `context` and the pool's size (`total_blocks` of `block_size`) bound a sequence."""

    def __init__(
        self, book: Book, tenants: Tenants, *, context: int, block_size: int, total_blocks: int, max_waiting: int
    ) -> None:
        self.orphans_at: int | None = None
        """When those that were not resumed are given up."""
        self._book = book
        self._context = context
        self._block_size = block_size
        self._pool = total_blocks * block_size
        self._max_waiting = max_waiting
        self._tenants = tenants
        self._orders = count()
        self._seq_ids = count()

    def enqueue(self, now_ns: int, asked: Enqueue) -> None:
        """A new request, or a known one under a later attempt. A double and an earlier attempt are ignored."""
        known = self._book.requests.get(asked.request_id)
        if known is not None:
            if asked.attempt > known.attempt:
                self._resume(now_ns, known, asked)
            return
        outbox = self._book.outbox
        try:
            request = self._request(now_ns, asked)
        except NotServed as refusal:
            reason = str(refusal)
            outbox.events.append(RequestFailed(request_id=asked.request_id, code=refusal.code, reason=reason))
            outbox.send(Role.TOKENIZER, Refused(asked.request_id, asked.attempt, refusal.field, reason, refusal.code))
            return
        self._book.requests[request.id] = request
        outbox.events.append(
            RequestQueued(
                request_id=request.id,
                trace_id=asked.trace_id,
                attempt=asked.attempt,
                prompt_tokens=request.prompt_len,
                n=asked.n,
                ahead=len(self._book.queue),
            )
        )
        if asked.attempt:
            outbox.events.append(_resumed(asked))
        self._start_choices(now_ns, request)

    def stop(self, now_ns: int, stop: Stop) -> None:
        """A stop string ended a choice: final over any later reason."""
        request = self._book.requests.get(stop.request_id)
        if request is None or stop.choice >= len(request.sequences):
            return
        sequence = request.sequences[stop.choice]
        if sequence.state is State.DONE:
            return
        keep = request.prompt_len + stop.index + 1
        sequence.dropped += max(0, len(sequence.tokens) - keep)
        del sequence.tokens[keep:]
        self._book.finish(now_ns, sequence, "stop", "stop string")
        self._book.forget_if_done(request)

    def cancel(self, now_ns: int, request_id: str) -> None:
        request = self._book.requests.get(request_id)
        if request is not None:
            self._book.drop(now_ns, request, "cancelled by its client")

    # ── orphans ──────────────────────────────────────────────────────────────────────────────────

    def tokenizer_lost(self) -> None:
        """No request has a way to its client until the client resumes it."""
        for request in self._book.requests.values():
            request.orphan = True
            self._book.readdress(request)

    def tokenizer_back(self, now_ns: int) -> None:
        if any(request.orphan for request in self._book.requests.values()):
            self.orphans_at = now_ns + ORPHAN_NS

    def expire_orphans(self, now_ns: int) -> None:
        if self.orphans_at is None or now_ns < self.orphans_at:
            return
        self.orphans_at = None
        for request in [r for r in self._book.requests.values() if r.orphan]:
            self._book.drop(now_ns, request, "its client did not come back")

    # ── taking in ────────────────────────────────────────────────────────────────────────────────

    def _request(self, now_ns: int, asked: Enqueue) -> Request:
        """Raises `NotServed`."""
        prompt, pool, waiting = len(asked.ids), self._pool, len(self._book.queue)
        most = asked.max_tokens
        if waiting + asked.n > self._max_waiting and not asked.attempt:  # what was taken once is not sent away
            raise NotServed("n", f"{waiting} sequences are waiting, {self._max_waiting} may", "overloaded")
        if prompt >= self._context:
            raise NotServed(
                "prompt",
                f"the prompt has {prompt} tokens; the context holds {self._context}, with at least one to generate",
                "context_length_exceeded",
            )
        if most is not None and prompt + most > self._context:
            raise NotServed(
                "max_tokens",
                f"{prompt} prompt tokens and max_tokens {most} exceed the context of {self._context}",
                "context_length_exceeded",
            )
        if prompt + (most or 1) > pool:
            raise NotServed(
                "max_tokens" if most is not None and prompt < pool else "prompt",
                f"{prompt} prompt tokens and {most or 1} to generate never fit the KV pool of {pool} tokens "
                f"({pool // self._block_size} blocks of {self._block_size})",
                "never_fits",
            )
        return Request(
            asked=asked,
            handle=asked.handle,
            attempt=asked.attempt,
            arrival_ns=now_ns,
            order=next(self._orders),
            tenant=self._tenants.number(asked.tenant),
            prompt_len=prompt,
            limit=min(self._context, pool) if most is None else prompt + most,
            stop_ids=frozenset(asked.stop_ids),
        )

    def _start_choices(self, now_ns: int, request: Request) -> None:
        """Every choice waits; all but the first wait to fork from it, unless they have outputs of their own."""
        asked, book, rows = request.asked, self._book, Rows()
        prompt = asked.ids.tolist()
        first: Sequence | None = None
        for choice in range(asked.n):
            delivered = asked.delivered[choice] if choice < len(asked.delivered) else []
            sequence = Sequence(request, choice, next(self._seq_ids), prompt + delivered, now_ns)
            request.sequences.append(sequence)
            book.queue.add(sequence)
            if choice < len(asked.finished) and asked.finished[choice]:
                book.leave(sequence)
            elif finish := finish_reason(sequence):
                book.finish(now_ns, sequence, finish, "already delivered", rows)
            elif first is not None and not delivered and len(prompt) > 1:
                sequence.fork_of = first
            else:
                first = first or sequence
                book.ask_match(sequence)
        book.outbox.send_rows(0, rows)
        book.forget_if_done(request)

    def _resume(self, now_ns: int, request: Request, asked: Enqueue) -> None:
        """The client lost its tokenizer, not us: go on, and say again what it did not get."""
        book, prompt = self._book, request.prompt_len
        for sequence, ids in zip(request.sequences, asked.delivered, strict=False):
            if sequence.tokens[prompt : prompt + len(ids)] != ids:
                book.drop(now_ns, request, "resumed with another past")
                self.enqueue(now_ns, asked)
                return
        request.handle, request.attempt, request.orphan = asked.handle, asked.attempt, False
        book.readdress(request)
        book.outbox.events.append(_resumed(asked))
        rows = Rows()
        if request.prompt_logprobs and not request.computes_prompt:
            rows.prompt(request)
        for sequence in request.sequences:
            choice = sequence.choice
            if choice < len(asked.finished) and asked.finished[choice]:
                if sequence.state is not State.DONE:
                    book.finish(now_ns, sequence, "stop", "ended by the client's journal")
                continue
            have = len(asked.delivered[choice]) if choice < len(asked.delivered) else 0
            if missing := sequence.tokens[prompt + have :]:
                rows.add(sequence, have, missing, sequence.logprobs_from(have))
            if sequence.state is State.DONE:
                rows.end(sequence, sequence.finish, "", now_ns)
        book.outbox.send_rows(0, rows)
        book.forget_if_done(request)


def _resumed(asked: Enqueue) -> RequestResumed:
    delivered = sum(len(ids) for ids in asked.delivered)
    return RequestResumed(request_id=asked.request_id, attempt=asked.attempt, delivered=delivered)
