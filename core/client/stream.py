"""What a consumer holds of a request: its pieces in order, its fate, and the way to leave it.

Knows nothing of sockets or attempts: `client` feeds it with what the journal let through. What a consumer leaves
waiting is joined to fewer, larger pieces; a `Backlog` also bounds it (without one, the request's own output does).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from octavo.core.messages import Row, Stages, TextLogprob, Times, Usage
from octavo.core.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType


BEHIND = 64
"""So many pieces may wait; then the next ones are joined to the last of their choice, if one waits."""


ANSWERED = ("stop", "length")
"""How a choice finishes that has given its answer."""


class ClientError(Exception):
    """Base of what the client library raises about a request."""


class RequestRefused(ClientError):
    """The request as it stands is not served; `field` names what is wrong in it, `code` is for machines."""

    def __init__(self, field: str, reason: str, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason
        self.code = code


class ServiceUnavailable(ClientError):
    """The service cannot take or finish requests now; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RequestFailed(ClientError):
    """A choice ended as `finish`: error or cancelled, without the request's own doing."""

    def __init__(self, finish: str, reason: str) -> None:
        super().__init__(f"the request ended as {finish}" + (f": {reason}" if reason else ""))
        self.finish = finish
        self.reason = reason


class Overrun(ClientError):
    """The consumer took so little that more waited for it than its backlog allows: the rest is not kept."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} bytes of output waited to be taken")


class Piece(msgspec.Struct, frozen=True):
    """Some output of one choice: `ids` from output `index` on, and exactly their text.

    `finish` is set on a choice's last piece: stop, length, cancelled or error, then with `reason` and `usage`.
    `prompt_logprobs` come with its first, if they were asked for."""

    choice: int
    index: int
    ids: list[int]
    text: str
    logprobs: list[TextLogprob] | None
    finish: str | None
    reason: str
    usage: Usage | None
    prompt_logprobs: list[TextLogprob] | None = None
    stages: Stages | None = None
    """How long the choice was in each stage, with its last piece, where the scheduler ended it."""


class TakenChoice(NamedTuple):
    """How the consumer took one choice, up to its last piece; as `messages.Taken` explains it."""

    choice: int
    tokens: int
    times: Times
    held_ns: int
    last_held_ns: int
    sent: Times | None


@dataclass(slots=True)
class _Taking:
    """A choice while it is taken."""

    pace: Pace
    tokens: int = 0
    held_ns: int = 0


@dataclass(slots=True)
class _Waiting:
    """A piece that nobody has taken yet."""

    piece: Piece
    came_ns: int
    sent: Times | None
    """What came with it of the whole choice."""


class Watcher(Protocol):
    """Somebody who counts: told of each piece as its consumer takes it, and when the stream is left."""

    def piece(self, piece: Piece) -> None: ...

    def left(self, error: ClientError | None) -> None: ...


Push: TypeAlias = "Callable[[Piece], bool]"
"""Takes a piece in the moment when it comes; false if it cannot, and the piece waits to be taken."""


class Backlog:
    """What may wait in all streams of one consumer together, in bytes; `overrun` is told, once, that it was more.
    It is called while everybody's output is received, so it only notes it, and never raises.

    Bytes are counted roughly: text, ids and log-probabilities as Python holds them."""

    def __init__(self, limit: int, overrun: Callable[[], None]) -> None:
        self.limit = limit
        self.waiting = 0
        self.most = 0
        """Of `waiting`, so far."""
        self.over = False
        self._overrun = overrun

    def add(self, n: int) -> bool:
        """Whether there is room for `n` bytes more (fewer, if negative); if not, there never is again."""
        if self.over or self.waiting + n > self.limit:
            if not self.over:
                self.over = True
                self._overrun()
            return False
        self.waiting += n
        self.most = max(self.most, self.waiting)
        return True


class Stream:
    """An open request: iterate over it for its pieces, of all choices, until every choice has ended.

    Leaving early cancels the request: use it as `async with stream: async for piece in stream: …`.
    """

    def __init__(
        self,
        request_id: str,
        n: int,
        cancel: Callable[[str], None],
        *,
        received_ns: int = 0,
        taken: Callable[[str, TakenChoice], None] | None = None,
    ) -> None:
        """`taken` is told when the consumer has a choice's last piece."""
        self.request_id = request_id
        self._received_ns = received_ns
        self._taken = taken
        self._taking: dict[int, _Taking] = {}
        self._open_choices = n
        self._unfed_choices = n
        self._open_tokens: dict[int, int] = {}
        """See `open_tokens`, by choice."""
        self.unseen_tokens = 0
        """What was generated for it and no piece shows, in a search for instance."""
        self._cancel = cancel
        self._pieces: deque[_Waiting] = deque()
        self._last: dict[int, _Waiting] = {}
        """Of `_pieces`, the last of each choice."""
        self._prompt_tokens: int | None = None
        self.ends: tuple[int, ...] = ()
        """The ids that end a choice, once the request is accepted."""
        self.error: ClientError | None = None
        """What has ended it, once all pieces before have been taken."""
        self.watch: Watcher | None = None
        self.push: Push | None = None
        """Asked first while its consumer waits in `take` and nothing else does: spares what waking it takes. Not for a
        choice's last piece. It is called while everybody's output is received, so it never raises."""
        self._backlog: Backlog | None = None
        self._free = 0
        """So much of what waits does not count in the backlog."""
        self._closed = False
        self._news: asyncio.Event | None = None
        """While somebody waits."""

    async def accepted(self) -> int:
        """Wait until the request is accepted: its prompt's length in tokens.

        Raises `RequestRefused` or `ServiceUnavailable`."""
        while self._prompt_tokens is None:
            if self.error is not None:
                raise self.error
            await self._wait()
        return self._prompt_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        piece = await self.take(None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    @property
    def over(self) -> bool:
        """Every choice's last piece has been taken, or the stream was left."""
        return self._open_choices == 0 or self._closed

    async def take(self, patience_s: float | None) -> Piece | None:
        """The next piece. None if none comes for so long, or once the stream is `over`. Raises what has ended it."""
        while not self._pieces:
            if self.error is not None:
                raise self.error
            if self.over or not await self._wait(patience_s):
                return None
        first = self._pieces.popleft()
        piece = first.piece
        if self._last[piece.choice] is first:
            del self._last[piece.choice]
        if self._backlog is not None:
            weight = _weight(piece)
            free = min(weight, self._free)
            self._free -= free
            self._backlog.add(free - weight)
        if piece.finish is not None:
            self._open_choices -= 1
            if piece.finish in ANSWERED:
                del self._open_tokens[piece.choice]
        self._note(piece, first.came_ns, first.sent)
        return piece

    def _note(self, piece: Piece, came_ns: int, sent: Times | None) -> None:
        """The consumer takes this piece."""
        now_ns = time.monotonic_ns()
        held_ns = now_ns - came_ns
        if (taking := self._taking.get(piece.choice)) is None:
            taking = self._taking[piece.choice] = _Taking(Pace(self._received_ns))
        if piece.ids:
            taking.pace.row(now_ns)
            taking.tokens += len(piece.ids)
        taking.held_ns = max(taking.held_ns, held_ns)
        if piece.finish is not None and self._taken is not None:
            times = taking.pace.end(now_ns)
            how = TakenChoice(piece.choice, taking.tokens, times, taking.held_ns, held_ns, sent)
            self._taken(self.request_id, how)
        if self.watch is not None:
            self.watch.piece(piece)

    async def aclose(self) -> None:
        """Leave the request; it is cancelled unless it has ended."""
        if not self._closed:
            self._closed = True
            if self.watch is not None:
                self.watch.left(self.error)
            self._cancel(self.request_id)
            self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # What the client feeds.

    def accept(self, prompt_tokens: int, ends: Sequence[int] = ()) -> None:
        self._prompt_tokens = prompt_tokens
        self.ends = tuple(ends)
        self._wake()

    def bound(self, backlog: Backlog) -> None:
        """What comes from now on counts in `backlog` while it waits: what waits already could not be taken before."""
        self._backlog = backlog
        self._free = sum(_weight(waiting.piece) for waiting in self._pieces)

    def feed(self, row: Row) -> None:
        self._open_tokens[row.choice] = self._open_tokens.get(row.choice, 0) + len(row.ids)
        piece = Piece(
            row.choice,
            row.index,
            row.ids,
            row.text,
            row.logprobs,
            row.finish,
            row.reason,
            row.usage,
            row.prompt_logprobs,
            row.stages,
        )
        at_rest = self._news is not None and not self._pieces
        if at_rest and piece.finish is None and self.push is not None and self.push(piece):
            self._note(piece, time.monotonic_ns(), None)
            return
        if not self._hold(piece):
            return
        self._unfed_choices -= piece.finish is not None
        last = self._last.get(piece.choice)
        if last is not None and len(self._pieces) >= BEHIND:
            last.piece, last.sent = _joined(last.piece, piece), row.times
        else:
            self._last[piece.choice] = waiting = _Waiting(piece, time.monotonic_ns(), row.times)
            self._pieces.append(waiting)
        self._wake()

    def _hold(self, piece: Piece) -> bool:
        """Whether there is room for it; if not, what waits is let go."""
        if self._backlog is None or self._backlog.add(_weight(piece)):
            return True
        self._pieces.clear()
        self._last.clear()
        self.fail(Overrun(self._backlog.limit))
        return False

    @property
    def open_tokens(self) -> int:
        """Output tokens that have come, taken or not, of choices that have not (as far as is taken) given a whole
        answer, and those that no piece shows."""
        return self.unseen_tokens + sum(self._open_tokens.values())

    @property
    def complete(self) -> bool:
        """Every choice's last row has been fed (if not yet consumed)."""
        return self._unfed_choices == 0

    def fail(self, error: ClientError) -> None:
        """Nothing more comes: what is buffered is still given out, then `error` is raised."""
        self.error = error
        self._wake()

    async def _wait(self, patience_s: float | None = None) -> bool:
        """Until something is new: False if nothing was for so long. Asyncio's own means, since this happens for every
        piece; a timer that only wakes costs less than a scope that cancels."""
        news = self._news = self._news or asyncio.Event()
        timer = None if patience_s is None else asyncio.get_running_loop().call_later(patience_s, news.set)
        try:
            await news.wait()
            return patience_s is None or self._news is not news
        finally:
            if timer is not None:
                timer.cancel()
            if self._news is news and news.is_set():  # by a timer, so of no use to who waits next
                self._news = None

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


def _joined(former: Piece, piece: Piece) -> Piece:
    """Two pieces of a choice, one right after the other, as one. Takes `former`'s lists."""
    former.ids.extend(piece.ids)
    logprobs = former.logprobs
    if logprobs is not None and piece.logprobs is not None:
        logprobs.extend(piece.logprobs)
    return msgspec.structs.replace(
        piece,
        index=former.index,
        ids=former.ids,
        text=former.text + piece.text,
        logprobs=piece.logprobs if logprobs is None else logprobs,
        prompt_logprobs=former.prompt_logprobs,
    )


def _weight(piece: Piece) -> int:
    """About how many bytes it takes, but for the prompt's log-probabilities: they come once and all together."""
    return len(piece.text) + 16 * len(piece.ids) + sum(200 + 150 * len(entry.top) for entry in piece.logprobs or ())
