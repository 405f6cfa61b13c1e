"""The client: what gateway, chat, `octavo.LLM` and benchmarks use to talk to a running daemon.

    async with Client.connect(run_dir) as client:
        async with await client.generate(Text("Once upon"), Params(max_tokens=20)) as stream:
            async for piece in stream:
                print(piece.text, end="")

The shell around `Session`: it has the sockets and tells the streams. It stays connected over restarts of any
actor; when the daemon itself ends, everything open fails with `ServiceUnavailable`. For asyncio (anyio), one thread.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec
import zmq

from octavo.core.client.adapters import KnownAdapters
from octavo.core.client.session import Peers, Question, Session
from octavo.core.client.stream import ClientError, RequestRefused, ServiceUnavailable, Stream, TakenChoice
from octavo.core.control import (
    AWAY,
    DRAINING,
    READY,
    STARTING,
    Adapters,
    AdapterSet,
    AskCache,
    Bye,
    CacheState,
    Progress,
    Ready,
    SetWeights,
    Shutdown,
    ToMember,
    Topology,
    TopologyAck,
    Who,
)
from octavo.core.control_link import ControlLink
from octavo.core.links import FENCED
from octavo.core.messages import (
    Accepted,
    Adapter,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Facts,
    Message,
    Params,
    Prompt,
    Refused,
    Role,
    Row,
    Submit,
    Taken,
    Tokenize,
    Tokenized,
    encode,
)
from octavo.core.rundir import RunInfo
from octavo.core.station import Report, Station
from octavo.core.trace.catalogue import WireDropped

PATIENCE_S = 10.0
"""How long a new request or question waits for an actor that is being restarted."""

ADAPTER_S = 120.0
"""How long an adapter may take to be read: steps that are under way come first."""

LAST_WORDS_MS = 200
"""How long a client that leaves waits at most for what it has just said to be sent."""

SEED_ABSENT = -1
"""As `Sampling.seed`: draw one."""

Answer = TypeVar("Answer", Tokenized, Detokenized, Described, CacheState)


class Health(NamedTuple):
    """Whether a request that comes now would be computed now, and if not, why."""

    ok: bool
    reason: str


class Client:
    """A connection to one daemon; made by `connect`."""

    def __init__(
        self, link: ControlLink, station: Station, name: str, run_dir: Path, *, address: str | None = None
    ) -> None:
        self.run_dir = run_dir
        self._link = link
        self._unannounced = address
        self._station = station
        self._name = name
        self._session = Session(name, station.mailbox.endpoint)
        self._streams: dict[str, Stream] = {}
        self._answers: dict[int, Tokenized | Detokenized | Described | CacheState | None] = {}
        self._last_ref = 0
        self._topology: Topology | None = None
        self._ended: str | None = None
        self._beats = 0
        self._news = anyio.Event()
        self._known = KnownAdapters()

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        run: Path | RunInfo,
        *,
        role: Role = Role.CLIENT,
        name: str = "",
        address: str | None = None,
        report: Report | None = None,
    ) -> AsyncIterator[Client]:
        """Connect to the daemon of a run folder; leaving cancels what is open. Ready or not: see `wait_ready`.

        A gateway says with `address` where it listens. `report` is told of frames that were dropped.
        Raises FileNotFoundError if no daemon was started there.
        """
        path = run.path if isinstance(run, RunInfo) else run
        name = name or f"{os.getpid()}-{secrets.token_hex(3)}"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        station = Station(context, path, role, report or _ignore, name=name)
        try:
            link = ControlLink.client(context, path, name, role)
            client = cls(link, station, name, path, address=address)
            try:
                raised: BaseException | None = None
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(client._listen)
                    tasks.start_soon(client._receive)
                    try:
                        yield client
                    except BaseException as error:  # noqa: BLE001 - raised below, unwrapped
                        raised = error
                    tasks.cancel_scope.cancel()
                if raised is not None:
                    raise raised
            finally:
                client._end("the client is closed")
                link.close(Bye())
        finally:
            station.close(LAST_WORDS_MS)
            context.term()

    # ── what can be asked ────────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        prompt: Prompt,
        params: Params,
        *,
        request_id: str | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_ns: int | None = None,
        trace_id: str = "",
        received_ns: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Stream:
        """Open a request. A seed of `SEED_ABSENT` is drawn here, once, so that a resumed request keeps it. Its times
        count from `received_ns`, when somebody else has received it for us.

        Raises `ServiceUnavailable` while the daemon starts or drains, or when an actor stays away for longer than
        `patience_s`, and `RequestRefused` for what no message can carry. Whether the request itself is served is for
        `Stream.accepted` to say.
        """
        received_ns = received_ns or time.monotonic_ns()
        await self._wait_open(patience_s)
        request_id = request_id or secrets.token_hex(12)
        if params.sampling.seed == SEED_ABSENT:
            sampling = msgspec.structs.replace(params.sampling, seed=secrets.randbits(63))
            params = msgspec.structs.replace(params, sampling=sampling)
        params = self._known.pinned(params)
        submit = Submit(
            client=self._name,
            request_id=request_id,
            attempt=0,
            prompt=prompt,
            params=params,
            received_ns=received_ns,
            tenant=tenant,
            priority=priority,
            deadline_ns=deadline_ns,
            trace_id=trace_id,
        )
        _check_carried(submit)
        messages = self._session.submit(submit)
        stream = self._streams[request_id] = Stream(
            request_id, params.n, self._leave, received_ns=received_ns, taken=self._taken
        )
        self._send(messages)
        return stream

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, timeout_s: float = PATIENCE_S
    ) -> list[int]:
        """Token ids of a prompt. Raises `RequestRefused`, or `ServiceUnavailable` when nobody answers in time."""
        question = Tokenize(self._name, self._ref(), prompt, add_special_tokens)
        answer = await self._ask(question, Tokenized, timeout_s)
        if answer.error is not None:
            raise RequestRefused("prompt", answer.error)
        return answer.ids

    async def detokenize(
        self,
        ids: list[int],
        *,
        before: list[int] | None = None,
        skip_special_tokens: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> str:
        """Text of token ids, or what they add to the text of `before`; raises like `tokenize`."""
        question = Detokenize(self._name, self._ref(), ids, before, skip_special_tokens)
        answer = await self._ask(question, Detokenized, timeout_s)
        if answer.error is not None:
            raise RequestRefused("tokens", answer.error)
        return answer.text

    async def tokenizer_config(self, *, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """What the model's tokenizer_config.json says. Raises `ServiceUnavailable`."""
        answer = await self._ask(Describe(self._name, self._ref()), Described, timeout_s)
        config: dict[str, Any] = json.loads(answer.config)
        return config

    async def cache(
        self,
        *,
        flush: bool = False,
        tenant: str | None = None,
        prefix: Sequence[int] = (),
        timeout_s: float = PATIENCE_S,
    ) -> CacheState:
        """How the prefix tree is. With `flush`, what is there of `tenant` (None: of anybody) and begins with the ids
        `prefix` is taken out of it first; what runs goes on. Raises `ServiceUnavailable`, and `RequestRefused` for a
        prefix of what can be no ids."""
        if (wrong := next((token for token in prefix if not 0 <= token < 2**31), None)) is not None:
            raise RequestRefused("prefix", f"{wrong} is no token id: these are from 0 to {2**31 - 1}")
        ref = self._ref()
        self._answers[ref] = None
        try:
            self._link.send(AskCache(ref=ref, flush=flush, tenant=tenant, prefix=list(prefix)))
            state = await self._answered(ref, CacheState, "KV-manager", timeout_s)
        finally:
            del self._answers[ref]
        if state.error:
            raise ServiceUnavailable(state.error)
        return state

    def weigh(self, weights: dict[str, float]) -> None:
        """Tell the policies what shares tenants have."""
        self._link.send(SetWeights(weights))

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Those that have a name now."""
        return self._known.named

    async def set_adapter(
        self, name: str, path: str = "", *, replace: bool = False, timeout_s: float = ADAPTER_S
    ) -> None:
        """Let `name` stand for the LoRA adapter at `path`, or for none without one; a name that is taken is given away
        only with `replace`. Requests that have begun go on with what they began with. When this returns, every client
        knows.

        Raises `RequestRefused` with what is wrong, `ServiceUnavailable` when nobody answers in time."""
        wish = self._known.wish(name, path, replace=replace)
        try:
            self._link.send(wish)
            with anyio.move_on_after(timeout_s):
                while self._ended is None:
                    if (answer := self._known.answer(wish)) is not None:
                        if answer.code == AWAY:
                            raise ServiceUnavailable(answer.why)
                        if answer.why:
                            raise RequestRefused("", answer.why, answer.code)
                        return
                    await self._news.wait()
            raise ServiceUnavailable(self.health().reason or f"the adapter was not set within {timeout_s:g} s")
        finally:
            self._known.forget(wish)

    @property
    def facts(self) -> Facts | None:
        """What the executor said of its model; None until it has loaded."""
        return self._topology.facts if self._topology is not None else None

    def health(self) -> Health:
        """As of the last word of the supervisor."""
        if self._ended is not None:
            return Health(ok=False, reason=self._ended)
        if self._topology is None:
            return Health(ok=False, reason="the supervisor has not answered yet")
        away = sorted(role.name.lower() for role in FENCED if self._station.links.live(role) is None)
        if self._topology.state == READY and not away:
            return Health(ok=True, reason="")
        waiting = f", waiting for {', '.join(away)}" if away else ""
        return Health(ok=False, reason=f"the service is {self._topology.state}{waiting}")

    async def wait_ready(self, timeout_s: float = math.inf) -> Facts:
        """Wait until a step can run. Raises `ServiceUnavailable` when the daemon ends first, or at the time-out."""
        with anyio.move_on_after(timeout_s):
            while self._ended is None:
                if self.health().ok and self.facts is not None:
                    return self.facts
                await self._news.wait()
        raise ServiceUnavailable(self.health().reason)

    def beat(self, stats: Mapping[str, int] = MappingProxyType({})) -> None:
        """Show that this event loop still turns; once begun, the supervisor expects it to go on. `stats` are small
        numbers of the owner's for `octavo status`."""
        self._beats += 1
        told = {"open": len(self._streams), **stats}
        progress = Progress(counter=self._beats, busy_since_ns=time.monotonic_ns(), stats=told)
        self._link.progress = lambda: progress

    async def wait_ended(self) -> str:
        """Wait until the daemon has ended or told everyone to stop; why."""
        while self._ended is None:
            await self._news.wait()
        return self._ended

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    async def _wait_open(self, patience_s: float) -> None:
        """Wait until a request can be sent."""
        with anyio.move_on_after(patience_s):
            while not self._finished_or_unborn():
                if self._peers() is not None:
                    return
                await self._news.wait()
        raise ServiceUnavailable(self.health().reason)

    def _finished_or_unborn(self) -> bool:
        state = self._topology.state if self._topology is not None else None
        return self._ended is not None or state in (STARTING, DRAINING)

    def _peers(self) -> Peers | None:
        """Both generations, if one can be sent to."""
        tokenizer = self._station.links.live(Role.TOKENIZER)
        scheduler = self._station.links.live(Role.SCHEDULER)
        if tokenizer is None or scheduler is None:
            return None
        return Peers(tokenizer.generation, scheduler.generation)

    def _ref(self) -> int:
        self._last_ref += 1
        return self._last_ref

    async def _ask(self, question: Question, kind: type[Answer], timeout_s: float) -> Answer:
        _check_carried(question)
        ref = question.ref
        self._answers[ref] = None
        try:
            self._send(self._session.ask(question))
            return await self._answered(ref, kind, "tokenizer", timeout_s)
        finally:
            del self._answers[ref]
            self._session.forget(ref)

    async def _answered(self, ref: int, kind: type[Answer], who: str, timeout_s: float) -> Answer:
        with anyio.move_on_after(timeout_s):
            while self._ended is None:
                answer = self._answers[ref]
                if isinstance(answer, kind):
                    return answer
                await self._news.wait()
        raise ServiceUnavailable(self.health().reason or f"the {who} has not answered for {timeout_s:g} s")

    def _leave(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._send(self._session.cancel(request_id))

    def _taken(self, request_id: str, how: TakenChoice) -> None:
        """Tell it, if anybody listens: it is only for the trace."""
        if self._ended is None and self._peers() is not None:
            self._send([Taken(request_id, *how)])

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            sent = self._station.send(Role.TOKENIZER, encode(message))
            if not sent and isinstance(message, Submit):
                self._session.cancel(message.request_id)
                self._fail(message.request_id, ServiceUnavailable("the tokenizer's queue is full"))

    def _fail(self, request_id: str, error: ClientError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)

    async def _listen(self) -> None:
        async for message in self._link.messages():
            self._obey(message)

    def _obey(self, message: ToMember) -> None:
        self._station.control(message)
        match message:
            case Topology(epoch=epoch):
                self._topology = message
                # From here alone: after a send elsewhere, `messages` could miss that something has come.
                self._link.send(TopologyAck(epoch))
                if self._unannounced is not None:
                    self._link.send(Ready(address=self._unannounced))
                    self._unannounced = None
            case Who():
                self._session.forgotten()
            case Adapters(adapters):
                self._known.named = {adapter.name: adapter for adapter in adapters}
            case AdapterSet():
                self._known.answered(message)
            case Shutdown(why):
                self._end(why)
            case CacheState(ref=ref) if ref in self._answers:
                self._answers[ref] = message
        self._send(self._session.connect(self._peers()))
        self._wake()

    def _end(self, why: str) -> None:
        if self._ended is None:
            self._ended = why
            for request_id in list(self._streams):
                self._fail(request_id, ServiceUnavailable(why))
            self._wake()

    async def _receive(self) -> None:
        while True:
            arrival = self._station.receive()
            if arrival is None:
                await self._station.wait()
                continue
            if arrival.news:
                self._send(self._session.connect(self._peers()))
            received = self._session.receive(arrival.body)
            for news in received.news:
                self._tell(news)
            self._send(received.messages)
            await asyncio.sleep(0)  # others have their turn between messages

    def _tell(self, news: Accepted | Refused | Row | Tokenized | Detokenized | Described) -> None:
        match news:
            case Row():
                stream = self._streams.get(news.request_id)
                if stream is not None:
                    stream.feed(news)
                    if stream.complete:
                        del self._streams[news.request_id]
            case Accepted():
                stream = self._streams.get(news.request_id)
                if stream is not None:
                    stream.accept(news.prompt_tokens, news.ends)
            case Refused():
                self._fail(news.request_id, RequestRefused(news.field, news.reason, news.code))
            case Tokenized() | Detokenized() | Described():
                self._answers[news.ref] = news
                self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()


def _check_carried(message: Submit | Question) -> None:
    """Before it is kept: it is encoded again whenever an actor comes back, and by then nobody is there to refuse it.

    Raises `RequestRefused`: JSON has larger numbers, halves of characters and deeper nesting than a message."""
    try:
        encode(message)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise RequestRefused("", f"the request cannot be carried: {error}") from error


def _ignore(dropped: WireDropped) -> None:
    """A script has no trace to write it to, and the journal makes up for it."""
