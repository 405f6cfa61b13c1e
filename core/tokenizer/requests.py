"""The requests that the tokenizer is answering, by every key that a message may name them with. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.messages import Enqueue, TextLogprob
from octavo.core.tokenizer.choice import Choice


@dataclass(slots=True)
class Live:
    """A request with choices that have not ended."""

    client: str
    request_id: str
    attempt: int
    handle: int
    received_ns: int
    prompt: list[int]
    choices: dict[int, Choice]
    """Those that have not ended, by number."""
    unanswered: Enqueue | None
    """What was, or is to be, sent to the scheduler, as long as nothing has come back for it."""
    prompt_logprobs: list[TextLogprob] | None = None
    """Known before any output, if they were asked for."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)


class Requests:
    """All live requests. A request id is live once: under its latest attempt."""

    def __init__(self) -> None:
        self._by_id: dict[str, Live] = {}
        self._by_handle: dict[int, Live] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Live]:
        """In the order of arrival; a copy, so that requests may be dropped meanwhile."""
        return iter(list(self._by_id.values()))

    def add(self, live: Live) -> None:
        if (former := self._by_id.get(live.request_id)) is not None:
            self.drop(former)
        self._by_id[live.request_id] = live
        self._by_handle[live.handle] = live

    def drop(self, live: Live) -> None:
        """Forget it. Harmless if it is forgotten already, or replaced by a later attempt."""
        self._by_handle.pop(live.handle, None)
        if self._by_id.get(live.request_id) is live:
            del self._by_id[live.request_id]

    def named(self, request_id: str) -> Live | None:
        return self._by_id.get(request_id)

    def handled(self, handle: int, attempt: int) -> Live | None:
        live = self._by_handle.get(handle)
        return live if live is not None and live.attempt == attempt else None

    def of_client(self, client: str) -> list[Live]:
        return [live for live in self if live.client == client]
