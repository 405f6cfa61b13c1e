"""Pieces are written in the moment when they come, where nothing has to be waited for; nobody sees a difference."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from octavo.core.client.stream import ClientError, Piece, Stream
from octavo.core.config.schema import Config
from octavo.core.messages import Params, Row, Usage
from octavo.plugins.openai.responses import CompletionReply
from tests.gateway.conftest import FakeEngine, serving

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"


class Watched:
    """Counts the pieces that were taken while they were fed."""

    def __init__(self) -> None:
        self.feeding = False
        self.pushed = 0
        self.left_with: list[ClientError | None] = []

    def piece(self, piece: Piece) -> None:
        self.pushed += self.feeding

    def left(self, error: ClientError | None) -> None:
        self.left_with.append(error)


class Dripping(FakeEngine):
    """A character at each turn of the loop, and never two before the consumer can wait again; from `burst` on, all."""

    def __init__(self, burst: int = 1 << 20) -> None:
        super().__init__()
        self.burst = burst
        self.answer = "one by one they come, and no two at once"
        self.watched: dict[str, Watched] = {}

    def play(self, stream: Stream, params: Params, ids: list[int]) -> None:
        stream.watch = self.watched[bytes(ids).decode()] = Watched()
        asyncio.get_running_loop().call_soon(self._drip, stream, self.watched[bytes(ids).decode()], 0, params.n)

    def _drip(self, stream: Stream, watched: Watched, i: int, n: int) -> None:
        if stream.over or stream.request_id in self.cancelled:
            return
        last = i == len(self.answer) - 1
        finish, usage = ("stop", Usage(3, i + 1, 0)) if last else (None, None)
        watched.feeding = True
        for choice in range(n):
            stream.feed(Row(stream.request_id, choice, 0, i, [i], self.answer[i], finish, usage=usage))
        watched.feeding = False
        if not last and i >= self.burst:
            self._drip(stream, watched, i + 1, n)
        elif not last:
            asyncio.get_running_loop().call_later(0.001, self._drip, stream, watched, i + 1, n)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def said(text: str, choice: int = 0) -> str:
    choices = [c for event in events(text) for c in event["choices"]]
    return "".join(c["text"] for c in choices if c["index"] == choice)


async def stream_of(client: httpx.AsyncClient, prompt: str, **fields: Any) -> str:
    return (await client.post(COMPLETIONS, json={"prompt": prompt, "stream": True, **fields})).text


@pytest.mark.parametrize("n", [1, 2])
async def test_what_comes_while_the_answer_rests_is_pushed(config: Config, n: int) -> None:
    engine = Dripping()
    with serving(engine, config) as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            text = await stream_of(client, "abc", n=n, **options)
    assert [said(text, choice) for choice in range(n)] == [engine.answer] * n
    assert engine.watched["abc"].pushed >= n * (len(engine.answer) - 4), "all but the first and the last ones"
    usage = [event["usage"]["completion_tokens"] for event in events(text)]
    assert usage == [*range(1, n * len(engine.answer) + 1), usage[-1]]


@pytest.mark.parametrize("burst", [1 << 20, 20], ids=["the rest later", "the rest at once"])
async def test_what_a_parser_raises_ends_its_answer_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    """Nothing is said after the piece that is missing."""
    chunks = CompletionReply.chunks

    def faulty(self: CompletionReply, number: int, piece: Piece) -> list[dict[str, object]]:
        if self._about.id in broken and piece.index == 20:
            raise RuntimeError("a parser's fault")
        return chunks(self, number, piece)

    broken: set[str] = set()
    monkeypatch.setattr(CompletionReply, "chunks", faulty)
    engine = Dripping(burst)
    with serving(engine, config) as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=10) as client, anyio.create_task_group() as tasks:
            whole: list[str] = []
            part = [""]

            async def beside() -> None:
                whole.append(await stream_of(client, "beside"))

            async def read(response: httpx.Response) -> None:
                async for text in response.aiter_text():
                    part[0] += text

            async def breaks() -> None:
                async with client.stream("POST", COMPLETIONS, json={"prompt": "bad", "stream": True}) as response:
                    broken.add(f"cmpl-{response.headers['x-request-id']}")
                    with pytest.raises(httpx.RemoteProtocolError):
                        await read(response)

            tasks.start_soon(beside)
            tasks.start_soon(breaks)
    assert said(whole[0]) == engine.answer
    assert engine.watched["bad"].pushed > 10
    got = [json.loads(line.removeprefix("data: ")) for line in part[0].split("\n\n") if line]
    assert "".join(choice["text"] for event in got for choice in event["choices"]) == engine.answer[:20]
    assert len(engine.cancelled) == (burst > len(engine.answer)), "what has all come is left without"


async def test_a_request_that_comes_before_the_last_answer_has_ended(config: Config) -> None:
    """On one connection: its client has sent both at once."""
    engine = Dripping()
    with serving(engine, config) as (url, _):
        parts = urlsplit(url)
        requests = b""
        for prompt, close in (("first", b""), ("second", b"connection: close\r\n")):
            body = json.dumps({"prompt": prompt, "stream": True}).encode()
            requests += b"POST %b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n" % (
                COMPLETIONS.encode(),
                close,
                len(body),
            )
            requests += body

        def talk() -> str:
            with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
                connection.sendall(requests)
                return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

        got = await anyio.to_thread.run_sync(talk)
    _, first, second = got.split("HTTP/1.1 200 OK")
    assert said(first) == said(second) == engine.answer
    assert engine.watched["second"].pushed
