"""A client's conversation with the tokenizer, across every restart: what to send, and what the consumers get.

The session knows which requests and questions are open, and under which generations of the tokenizer and the
scheduler each was last sent. Whenever one of the two has lost its state, every open request is submitted again,
as the next attempt and with its journal; a consumer sees only a pause. The KV-manager's and the executors' deaths
are the scheduler's business and need nothing from here.

Pure: `client` gives it messages and topologies, and sends what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import msgspec

from octavo.core.client.journal import Journal, Verdict
from octavo.core.messages import (
    Accepted,
    Attach,
    Body,
    Cancel,
    Deliver,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Message,
    Refused,
    Row,
    Submit,
    Tokenize,
    Tokenized,
)

Question: TypeAlias = Tokenize | Detokenize | Describe


class Peers(NamedTuple):
    """The generations that a request depends on, while the service is able to take requests."""

    tokenizer: int
    scheduler: int


_OBSOLETE = Peers(-1, -1)
"""Differs from all real generations: the request must be sent again."""


@dataclass(frozen=True, slots=True)
class _Live:
    submit: Submit
    """As of its latest attempt."""
    journal: Journal
    sent: Peers | None = None
    """Under which generations that attempt was sent; None: it waits for the service."""


class Received(NamedTuple):
    """What a message means: news for consumers (and askers), and messages to send."""

    news: list[Accepted | Refused | Row | Tokenized | Detokenized | Described]
    messages: list[Message]


class Session:
    """Open requests and questions of the client `name`, whose mailbox is bound at `endpoint`."""

    def __init__(self, name: str, endpoint: str) -> None:
        self._attach = Attach(name, endpoint)
        self._peers: Peers | None = None
        self._attached: int | None = None
        self._live: dict[str, _Live] = {}
        self._asked: dict[int, Question] = {}
        self._cancelled: set[str] = set()

    def connect(self, peers: Peers | None) -> list[Message]:
        """The topology changed. `peers` is None as long as the service cannot take requests: all is held."""
        self._peers = peers
        if peers is None:
            return []
        messages: list[Message] = []
        if self._attached != peers.tokenizer:
            self._attached = peers.tokenizer
            messages += [self._attach, *self._asked.values()]
        messages += [Cancel(request_id) for request_id in self._cancelled]
        self._cancelled.clear()
        for live in list(self._live.values()):
            if live.sent != peers:
                messages += self._send(live)
        return messages

    def forgotten(self) -> None:
        """The service has taken this client for gone and cancelled its requests: at the next `connect`, attach and
        submit again."""
        self._attached = None
        self._live = {key: replace(live, sent=live.sent and _OBSOLETE) for key, live in self._live.items()}

    def submit(self, request: Submit) -> list[Message]:
        """Open a request. Its id must not be open already."""
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id!r} is open already: give each one an id of its own")
        live = _Live(request, Journal(request.params.n))
        self._live[request.request_id] = live
        return self._send(live)

    def cancel(self, request_id: str) -> list[Message]:
        """The consumer has left: whatever still arrives for this request is dropped."""
        if self._live.pop(request_id, None) is None:
            return []
        if self._peers is None:
            # Whoever survived may still be computing it.
            self._cancelled.add(request_id)
            return []
        return [Cancel(request_id)]

    def ask(self, question: Question) -> list[Message]:
        """Ask the tokenizer; asked again if it restarts before it has answered."""
        self._asked[question.ref] = question
        return [question] if self._peers is not None else []

    def forget(self, ref: int) -> None:
        """Nobody waits for this answer any more."""
        self._asked.pop(ref, None)

    def receive(self, message: Body) -> Received:
        """Take a message from the mailbox."""
        match message:
            case Deliver(rows):
                return self._rows(rows)
            case Accepted(request_id, attempt) | Refused(request_id, attempt):
                live = self._live.get(request_id)
                if live is None or live.journal.attempt != attempt:
                    return Received([], [])
                if isinstance(message, Refused):
                    del self._live[request_id]
                return Received([message], [])
            case Tokenized(ref) | Detokenized(ref) | Described(ref):
                known = self._asked.pop(ref, None) is not None
                return Received([message] if known else [], [])
            case _:
                raise ValueError(f"a client does not take {type(message).__name__}")

    def _rows(self, rows: list[Row]) -> Received:
        received = Received([], [])
        for row in rows:
            live = self._live.get(row.request_id)
            if live is None:
                continue
            match live.journal.take(row):
                case Verdict.TAKEN:
                    received.news.append(row)
                    if live.journal.done:
                        del self._live[row.request_id]
                case Verdict.GAP:
                    received.messages.extend(self._send(live))
                case Verdict.DROPPED:
                    pass
        return received

    def _send(self, live: _Live) -> list[Message]:
        """Submit a request, as its next attempt if one was sent before; held while the service is away."""
        if self._peers is None:
            if live.sent is not None:
                self._live[live.submit.request_id] = replace(live, sent=_OBSOLETE)
            return []
        submit = live.submit
        if live.sent is not None:
            delivered = live.journal.resume()
            submit = msgspec.structs.replace(submit, attempt=live.journal.attempt, delivered=delivered)
        self._live[submit.request_id] = replace(live, submit=submit, sent=self._peers)
        return [submit]
