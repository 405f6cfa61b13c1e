"""A gateway over an engine that is no engine: each character of the answer is a token, and the test says when."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import httpx
import pytest

from octavo.core.client.client import Health
from octavo.core.client.stream import ClientError, RequestRefused, ServiceUnavailable, Stream
from octavo.core.config.schema import Config, ServerConfig
from octavo.core.control import TAKEN, UNKNOWN, CacheState
from octavo.core.messages import Adapter, Chat, Facts, Ids, Params, Prompt, Row, Text, TextLogprob, Usage
from octavo.plugins.openai.app import Server, bind, build_app, make_server

CONTEXT = 200


class FakeEngine:
    """Answers every prompt with `answer`, a piece per character, unless `silent` (then the test feeds `streams`)."""

    def __init__(self) -> None:
        self.answer = "héllo 👍"
        self.silent = False
        self.unavailable: str | None = None
        self.error_after: int | None = None
        self.seen: list[tuple[str, Prompt, Params]] = []
        self.streams: dict[str, Stream] = {}
        self.cancelled: list[str] = []
        self.trace_ids: list[str] = []
        self.received: list[int | None] = []
        self.tenants: list[str] = []
        self.deadlines: list[int | None] = []
        self.adapters: dict[str, Adapter] = {}
        self.facts: Facts | None = Facts(
            model_id="m",
            context=CONTEXT,
            vocab_size=256,
            block_size=16,
            total_blocks=64,
            block_bytes=1,
            cache_seed=b"s",
        )

    async def set_adapter(self, name: str, path: str = "", *, replace: bool = False) -> None:
        if path and name in self.adapters and not replace:
            raise RequestRefused("", f"the adapter {name!r} is loaded already", TAKEN)
        if not path and name not in self.adapters:
            raise RequestRefused("", f"there is no adapter {name!r}", UNKNOWN)
        if path:
            self.adapters[name] = Adapter(name, path, path.encode())
        else:
            del self.adapters[name]

    def health(self) -> Health:
        return Health(self.unavailable is None, self.unavailable or "")

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
    ) -> Stream:
        if self.unavailable is not None:
            raise ServiceUnavailable(self.unavailable)
        assert request_id is not None
        assert priority == 0
        self.received.append(received_ns)
        self.trace_ids.append(trace_id)
        self.tenants.append(tenant)
        self.deadlines.append(deadline_ns)
        self.seen.append((request_id, prompt, params))
        stream = self.streams[request_id] = Stream(request_id, params.n, self._left)
        ids = self._ids(prompt)
        if len(ids) >= CONTEXT:
            stream.fail(RequestRefused("prompt", f"{len(ids)} tokens", "context_length_exceeded"))
            return stream
        stream.accept(len(ids))
        if not self.silent:
            self.play(stream, params, ids)
        return stream

    def _left(self, request_id: str) -> None:
        if not self.streams[request_id].complete:
            self.cancelled.append(request_id)

    def play(self, stream: Stream, params: Params, ids: list[int]) -> None:
        """Choice k's tokens have the log-probability -(k + 1) / 2, the prompt's -1/8."""
        limit = len(self.answer) if params.max_tokens is None else min(params.max_tokens, len(self.answer))
        for i in range(limit):
            for choice in range(params.n):
                if i == self.error_after:
                    stream.feed(Row(stream.request_id, choice, 0, i, [], "", "error", "the step broke"))
                    return
                last = i == limit - 1
                finish = None if not last else "stop" if limit == len(self.answer) else "length"
                usage = Usage(len(ids), limit, 4) if last else None
                character = self.answer[i]
                logprobs = [_entry(character, -(choice + 1) / 2)] if params.sampling.logprobs >= 0 else None
                prompt = None
                if params.sampling.prompt_logprobs >= 0 and i == 0:
                    prompt = [_entry(chr(token), -0.125) for token in ids]
                stream.feed(Row(stream.request_id, choice, 0, i, [i], character, finish, "", usage, logprobs, prompt))

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens
        return self._ids(prompt)

    async def detokenize(
        self, ids: list[int], *, before: list[int] | None = None, skip_special_tokens: bool = False
    ) -> str:
        if max(ids, default=0) > 255:
            raise RequestRefused("tokens", "an id is out of range")
        return bytes(ids).decode(errors="replace")

    async def tokenizer_config(self) -> dict[str, Any]:
        return {"tokenizer_class": "Fake"}

    async def cache(self, *, flush: bool) -> CacheState:
        return CacheState(ref=0, freed=3, in_use=2) if flush else CacheState(ref=0)

    def _ids(self, prompt: Prompt) -> list[int]:
        match prompt:
            case Text(text):
                return list(text.encode())
            case Ids(ids):
                return ids
            case Chat():
                return list("".join(turn["content"] for turn in prompt.messages).encode())

    async def until(self, request_id: str) -> None:
        """Wait until this request is cancelled."""
        with anyio.fail_after(5):
            while request_id not in self.cancelled:
                await anyio.sleep(0.005)

    def only_request(self) -> str:
        ((request_id, _, _),) = self.seen
        return request_id

    def fail(self, error: ClientError) -> None:
        self.streams[self.only_request()].fail(error)


def _entry(character: str, logprob: float) -> TextLogprob:
    return TextLogprob(character, character.encode(), logprob, [(character, character.encode(), logprob)])


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def config() -> Config:
    return Config(server=ServerConfig(max_body_bytes=4096))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def http(engine: FakeEngine, config: Config, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """Requests straight into the application, without a socket."""
    transport = httpx.ASGITransport(build_app(engine, config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
        yield client


@contextmanager
def serving(engine: FakeEngine, config: Config) -> Iterator[tuple[str, Server]]:
    """The application behind a real socket and server, in a thread of its own."""
    with bind(config.server, 0) as listener:
        server = make_server(build_app(engine, config), config.server)

        async def serve() -> None:
            await server.serve(sockets=[listener])

        options: dict[str, Any] = {"use_uvloop": True}
        thread = threading.Thread(target=anyio.run, args=(serve,), kwargs={"backend_options": options}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture
def url(engine: FakeEngine, config: Config) -> Iterator[str]:
    with serving(engine, config) as (address, _):
        yield address
