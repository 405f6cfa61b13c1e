"""One answer over HTTP, from the engine's streams to the last byte: whole or as events.

An `Answer` is the ASGI application of a single request. Everything happens inside its call, under one scope: when
the client disconnects, at whatever point, the scope is cancelled, and leaving the streams cancels their requests.
"""

from __future__ import annotations

import math
import time
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio
import msgspec
from starlette.responses import Response

from octavo.core.client.stream import Backlog, ClientError, Piece, Push, RequestFailed, RequestRefused, Stream
from octavo.core.messages import Ids, Row, Usage
from octavo.plugins.openai import sse
from octavo.plugins.openai.connection import DROP, WRITE
from octavo.plugins.openai.errors import ApiError, failed, from_client, limited, unauthorized
from octavo.plugins.openai.responses import Total
from octavo.plugins.openai.search import Searcher
from octavo.plugins.openai.tenants.account import Account, Limited, Withdrawn

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectSendStream
    from starlette.types import Receive, Scope, Send

    from octavo.core.client.client import Health
    from octavo.core.control import CacheState
    from octavo.core.messages import Adapter, Facts, Params, Prompt
    from octavo.plugins.openai.asked import Asked
    from octavo.plugins.openai.connection import Write
    from octavo.plugins.openai.responses import Reply
    from octavo.plugins.openai.tenants.ledger import Outcome

KEEP_ALIVE_S = 15.0
LONGEST_MS = 1_000_000_000

News: TypeAlias = tuple[int, Piece | ApiError]
"""A piece and the number of its choice over HTTP, or what ends the whole answer."""


class Engine(Protocol):
    """What the gateway needs of the client library."""

    @property
    def facts(self) -> Facts | None: ...

    @property
    def adapters(self) -> Mapping[str, Adapter]: ...

    async def set_adapter(self, name: str, path: str = "", *, replace: bool = False) -> None: ...

    def health(self) -> Health: ...

    async def generate(
        self,
        prompt: Prompt,
        params: Params,
        *,
        request_id: str | None,
        tenant: str,
        priority: int,
        deadline_ns: int | None,
        trace_id: str,
        received_ns: int | None,
    ) -> Stream: ...

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool) -> list[int]: ...

    async def detokenize(
        self, ids: list[int], *, before: list[int] | None = None, skip_special_tokens: bool = False
    ) -> str: ...

    async def tokenizer_config(self) -> dict[str, Any]: ...

    async def cache(self, *, flush: bool) -> CacheState: ...


@dataclass(slots=True)
class Load:
    """How many answers are being given, and what has waited for their clients."""

    open: int = 0
    backlogs: list[Backlog] = field(default_factory=list)
    """Of the streams that are open."""
    _most: int = 0

    @property
    def backlog_most(self) -> int:
        """The most bytes that have waited for one client so far, beside its connection."""
        return max([self._most, *(backlog.most for backlog in self.backlogs)])

    @contextmanager
    def held(self, backlog: Backlog) -> Iterator[None]:
        self.backlogs.append(backlog)
        try:
            yield
        finally:
            self.backlogs.remove(backlog)
            self._most = max(self._most, backlog.most)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: what the engine is told of the call, and who is told what it cost."""

    request_id: str
    trace_id: str
    account: Account | None = None
    """Whose key it is, and what it may still ask for; None where nobody needs a key."""
    received_ns: int | None = None
    """When the call came, on the monotonic clock."""
    buffer_bytes: int = 4 * 1024 * 1024
    """Output of a stream that may wait for it; with more, its connection is dropped."""
    load: Load = field(default_factory=Load)

    @property
    def tenant(self) -> str:
        return "" if self.account is None else self.account.key.tenant


class Answer(Response):
    """Answers `asked`; several prompts are several requests of the engine, `<id>-<number>`."""

    def __init__(self, engine: Engine, asked: Asked, reply: Reply, caller: Caller, headers: dict[str, str]) -> None:
        self._engine = engine
        self._asked = asked
        self._reply = reply
        self._caller = caller
        self._extra_headers = headers
        self._total = Total()
        self._streams: list[Stream] = []
        self._charged = 0
        """Output tokens that its account has been charged for."""
        self._fault: Exception | None = None
        """What pushing a piece has raised: the next that is taken is that piece, and it ends the answer."""
        self._deadline_ns = (
            None if asked.deadline_ms is None else time.monotonic_ns() + min(asked.deadline_ms, LONGEST_MS) * 1_000_000
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._caller.load.open += 1
        try:
            await self._answer(scope, receive, send)
        except Exception:  # told and logged outside: only the ledger is to know that its client did not leave
            self._end("failed")
            raise
        finally:
            self._caller.load.open -= 1
            self._end("cancelled")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_disconnected, receive, tasks.cancel_scope)
            try:
                async with AsyncExitStack() as streams:
                    received_ns = await self._take_turn(streams)
                    async for stream in self._open(tasks, received_ns):
                        self._streams.append(await streams.enter_async_context(stream))
                    opened = self._streams
                    for number, stream in enumerate(opened):
                        accepted = await self._accepted(number, stream)
                        self._total.prompt += accepted
                        self._charge(prompt=accepted)
                    # How fast a whole answer is read shows only once it is complete, and a search's comes whole.
                    if self._asked.stream and self._asked.beams is None:
                        drop = scope.get("extensions", {}).get(DROP, tasks.cancel_scope.cancel)
                        backlog = Backlog(self._caller.buffer_bytes, drop)
                        streams.enter_context(self._caller.load.held(backlog))
                        for stream in opened:
                            stream.bound(backlog)
                    await self._respond(tasks, opened, scope, receive, send)
            except ApiError as known:
                # Raised only before the response has begun.
                error = known
                self._end("failed" if error.status == HTTPStatus.INTERNAL_SERVER_ERROR else "refused")
            tasks.cancel_scope.cancel()
        if error is not None:
            await error_response(error)(scope, receive, send)

    async def _take_turn(self, held: AsyncExitStack) -> int | None:
        """From when on its times count: from when the call came, but for what its key's own limits let it wait."""
        received_ns = self._caller.received_ns
        if self._caller.account is None:
            return received_ns
        before_ns = time.monotonic_ns()
        try:
            await held.enter_async_context(self._caller.account.turn(len(self._asked.prompts)))
        except Limited as error:
            raise limited(error) from error
        return None if received_ns is None else received_ns + time.monotonic_ns() - before_ns

    def _charge(self, prompt: int = 0, output: int = 0) -> None:
        if self._caller.account is not None:
            self._charged += output
            self._caller.account.spend(prompt, output)

    def _charge_output(self, n: int) -> None:
        self._charge(output=n)

    def _charge_search(self, n: int) -> None:
        """Its client is given nothing before the end. Raises `RequestFailed` if its key is good no longer."""
        self._charge_output(n)
        if self._caller.account is not None:
            try:
                self._caller.account.check()
            except Withdrawn as error:
                raise RequestFailed("cancelled", str(error)) from error

    def _end(self, outcome: Outcome) -> None:
        """Note what it has used, as far as is known: of a whole answer, what its usage says; of another, the tokens
        that have come, taken or not. What was refused has cost nothing. Only the first word counts."""
        if self._caller.account is None or self._caller.account.ended:
            return
        used = Total() if outcome == "refused" else self._total
        output = used.completion + sum(stream.open_tokens for stream in self._streams)
        self._charge(output=output - self._charged)
        self._caller.account.end(outcome, used.prompt, used.cached, output)

    async def _open(self, tasks: TaskGroup, received_ns: int | None) -> AsyncIterator[Stream]:
        prompts = self._asked.prompts
        for number, prompt in enumerate(prompts):
            own = self._caller.request_id
            request_id = own if len(prompts) == 1 else f"{own}-{number}"
            try:
                yield await self._start(prompt, request_id, tasks, received_ns)
            except ClientError as error:
                raise from_client(error) from error

    async def _start(self, prompt: Prompt, request_id: str, tasks: TaskGroup, received_ns: int | None) -> Stream:
        params = self._asked.params
        if params.max_tokens == 0:
            return await measured(self._engine, prompt, params.n, request_id)
        if self._asked.beams is not None:
            charge = self._charge_search
            search = Searcher(self._engine, self._generate, self._asked.beams, params, request_id, charge)
            return search.start(prompt, tasks)
        return await self._generate(prompt, params, request_id, received_ns)

    async def _generate(
        self, prompt: Prompt, params: Params, request_id: str, received_ns: int | None = None
    ) -> Stream:
        return await self._engine.generate(
            prompt,
            params,
            request_id=request_id,
            tenant=self._caller.tenant,
            priority=self._asked.priority,
            deadline_ns=self._deadline_ns,
            trace_id=self._caller.trace_id,
            received_ns=received_ns,
        )

    async def _accepted(self, number: int, stream: Stream) -> int:
        try:
            return await stream.accepted()
        except ClientError as error:
            raise self._told(number, error) from error

    def _told(self, number: int, error: ClientError) -> ApiError:
        """An error of one prompt; of several, it names which."""
        several = len(self._asked.prompts) > 1 and isinstance(error, RequestRefused)
        return from_client(error, f"prompt[{number}]" if several else None)

    async def _respond(
        self, tasks: TaskGroup, streams: list[Stream], scope: Scope, receive: Receive, send: Send
    ) -> None:
        news = self._news(0, streams[0]) if len(streams) == 1 else self._merged(tasks, streams)
        async with aclosing(news):
            if self._asked.stream:
                write = scope.get("extensions", {}).get(WRITE)
                alike = len(streams) == 1 and not self._asked.echo and not self._asked.scores_only
                await self._events(streams, news, send, self._push(write) if write and alike else None)
            else:
                body = msgspec.json.encode(await self._whole(news))
                self._end("finished")
                response = Response(body, media_type="application/json", headers=self._extra_headers)
                await response(scope, receive, send)

    async def _news(self, number: int, stream: Stream) -> AsyncGenerator[News | None]:
        """One prompt's pieces, and None whenever none has come for a while; an error ends them."""
        first = number * self._asked.params.n
        try:
            text = await self._prompt_text(number) if self._asked.echo else ""
            begun: set[int] = set()
            while (piece := await stream.take(KEEP_ALIVE_S)) is not None or not stream.over:
                if piece is None:
                    yield None
                    continue
                if self._asked.echo and piece.choice not in begun:
                    begun.add(piece.choice)
                    yield first + piece.choice, _echo(piece, text)
                yield first + piece.choice, _without_output(piece) if self._asked.scores_only else piece
        except ClientError as error:
            yield first, self._told(number, error)

    async def _merged(self, tasks: TaskGroup, streams: list[Stream]) -> AsyncGenerator[News | None]:
        """Those of several prompts, as they come."""
        outgoing, incoming = anyio.create_memory_object_stream[News | None](0)
        with incoming:
            with outgoing:
                for number, stream in enumerate(streams):
                    tasks.start_soon(_pump, self._news(number, stream), outgoing.clone())
            async for news in incoming:
                yield news

    async def _prompt_text(self, number: int) -> str:
        prompt = self._asked.prompts[number]
        return await self._engine.detokenize(prompt.ids) if isinstance(prompt, Ids) else getattr(prompt, "text", "")

    async def _whole(self, pieces: AsyncGenerator[News | None]) -> dict[str, object]:
        n, shown = self._asked.params.n, self._asked.shown
        choices: list[list[Piece]] = [[] for _ in range(len(self._asked.prompts) * n)]
        async for news in pieces:
            if news is not None:
                choices[news[0]].append(self._checked(news[1]))
            self._check_key()
        if shown < n:
            groups = [choices[i : i + n] for i in range(0, len(choices), n)]
            choices = [one for group in groups for one in sorted(group, key=mean_logprob, reverse=True)[:shown]]
        return self._reply.whole(choices, self._total)

    async def _events(
        self, streams: list[Stream], pieces: AsyncGenerator[News | None], send: Send, push: Push | None
    ) -> None:
        """The response begins with the first piece (or pause): until then the scheduler may refuse what was
        accepted, and the status tells it. From then on pieces are pushed, where they can be."""
        begun = False
        try:
            async for news in pieces:
                if self._fault is not None:
                    raise self._fault
                piece = None if news is None else self._checked(news[1])
                self._check_key()
                if not begun:
                    self._raise_refusals(streams)
                    begun = True
                    await self._begin(send)
                    streams[0].push = push
                if news is None or piece is None:
                    await _write(send, sse.KEEP_ALIVE)
                elif events := self._events_of(news[0], piece):
                    await _write(send, events)
        except ApiError as error:
            if not begun:
                raise
            # Too late for a status: the error is an event, and no [DONE] follows it.
            self._end("failed")
            await _write(send, sse.event(self._reply.failed(error)), last=True)
            return
        self._end("finished")
        if self._asked.include_usage:
            await _write(send, sse.event(self._reply.usage_chunk(self._total)))
        await _write(send, self._reply.done, last=True)

    def _push(self, write: Write) -> Push:
        """Writes pieces of the only prompt in the moment when they come, without waking this answer's task."""

        def make(piece: Piece) -> bytes:
            self._count(piece)
            return self._events_of(piece.choice, piece)

        def push(piece: Piece) -> bool:
            try:
                if self._caller.account is not None:
                    self._caller.account.check()
                return write(partial(make, piece))
            except Withdrawn:
                return False
            except Exception as error:  # noqa: BLE001 - a parser's, say: it ends this answer, not who received the piece
                self._fault = error
                return False

        return push

    def _events_of(self, number: int, piece: Piece) -> bytes:
        return b"".join(map(self._event, self._reply.chunks(number, piece)))

    def _raise_refusals(self, streams: list[Stream]) -> None:
        for number, stream in enumerate(streams):
            if stream.error is not None:
                raise self._told(number, stream.error)

    def _checked(self, news: Piece | ApiError) -> Piece:
        """Count the piece; raise what makes the whole answer fail."""
        if isinstance(news, ApiError):
            self._check_key()
            raise news
        if news.finish not in (None, "stop", "length"):
            raise failed(news.finish, news.reason)
        self._count(news)
        return news

    def _count(self, piece: Piece) -> None:
        self._total.add(piece)
        if self._asked.beams is None:  # a search's have been charged as they came
            self._charge_output(len(piece.ids))

    def _check_key(self) -> None:
        """Whether it still is good: asked once the piece has been counted, which its client does not get otherwise."""
        if (account := self._caller.account) is not None:
            try:
                account.check()
            except Withdrawn as error:
                self._end("cancelled")
                raise unauthorized(str(error), error.code) from error

    async def _begin(self, send: Send) -> None:
        headers = {**sse.HEADERS, **self._extra_headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        for number in range(len(self._asked.prompts) * self._asked.params.n):
            for chunk in self._reply.opening(number):
                await _write(send, self._event(chunk))

    def _event(self, chunk: dict[str, object]) -> bytes:
        if self._asked.continuous_usage:
            chunk["usage"] = self._total.body_so_far()
        return sse.event(chunk)


def mean_logprob(pieces: list[Piece]) -> float:
    """By which `best_of` chooses: the mean over a choice's output tokens."""
    values = [entry.logprob for piece in pieces if piece.index >= 0 for entry in piece.logprobs or ()]
    return sum(values) / len(values) if values else -math.inf


def _echo(first: Piece, text: str) -> Piece:
    """The prompt, as the piece before a choice's first one."""
    return msgspec.structs.replace(
        first, index=-1, ids=[], text=text, logprobs=first.prompt_logprobs, finish=None, usage=None
    )


def _without_output(piece: Piece) -> Piece:
    """Where only the prompt's log-probabilities were asked for."""
    usage = None if piece.usage is None else msgspec.structs.replace(piece.usage, completion=0)
    finish = "length" if piece.finish == "stop" else piece.finish
    return msgspec.structs.replace(piece, ids=[], text="", logprobs=None, usage=usage, finish=finish)


async def measured(engine: Engine, prompt: Prompt, n: int, request_id: str) -> Stream:
    """`max_tokens: 0`: only the prompt's tokens are counted, there is nothing to compute."""
    ids = await engine.tokenize(prompt, add_special_tokens=True)
    stream = Stream(request_id, n, cancel=_nothing_to_cancel)
    context = engine.facts.context if engine.facts is not None else 0
    if len(ids) > context:
        reason = f"the prompt has {len(ids)} tokens, the context is {context}"
        raise RequestRefused("prompt", reason, "context_length_exceeded")
    stream.accept(len(ids))
    for choice in range(n):
        stream.feed(Row(request_id, choice, 0, 0, [], "", "length", usage=Usage(len(ids), 0, 0)))
    return stream


def _nothing_to_cancel(request_id: str) -> None:
    """It never was a request of the engine."""


def error_response(error: ApiError) -> Response:
    body = msgspec.json.encode(error.body())
    return Response(body, status_code=error.status, media_type="application/json", headers=error.headers())


async def _pump(news: AsyncGenerator[News | None], outgoing: MemoryObjectSendStream[News | None]) -> None:
    async with outgoing, aclosing(news):
        with suppress(anyio.BrokenResourceError):  # raised once nobody listens: the answer has failed
            async for one in news:
                await outgoing.send(one)


async def _write(send: Send, data: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})


async def _until_disconnected(receive: Receive, scope: anyio.CancelScope) -> None:
    """The body has been read, so the next thing a client can say is that it has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
