"""A client that does not read: nobody waits for it, what is kept for it is bounded, and in the end it is dropped."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from octavo.core.client.stream import Stream
from octavo.core.config.schema import Config, ServerConfig
from octavo.core.messages import Params, Row
from octavo.plugins.openai import connection as connection_module
from octavo.plugins.openai.app import Server, build_app
from tests.gateway.conftest import FakeEngine, serving

KIB = 1024
EVENT = 4 * KIB
BUFFER = 256 * KIB
CONNECTION = 64 * KIB
SLOW_S = 1.0
PATIENCE_S = 30.0
FRAME = 1 * KIB
"""More than what one event has beside its text."""


class Endless(FakeEngine):
    """Every stream gets 4 KiB about each millisecond, until it is left."""

    def play(self, stream: Stream, params: Params, ids: list[int]) -> None:
        asyncio.get_running_loop().call_soon(self._feed, stream, 0)

    def _feed(self, stream: Stream, index: int) -> None:
        if stream.request_id not in self.cancelled and stream.error is None:
            stream.feed(Row(stream.request_id, 0, 0, index, [index], "x" * EVENT))
            asyncio.get_running_loop().call_later(0.001, self._feed, stream, index + 1)

    @property
    def waiting(self) -> int:
        """The most that waits for one client."""
        return max((s._backlog.waiting for s in list(self.streams.values()) if s._backlog), default=0)


def reader(url: str, stack: ExitStack, *, window: int = 4 * KIB) -> socket.socket:
    """A client that has asked for a stream, and whose own buffer is small."""
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(PATIENCE_S)
    parts = urlsplit(url)
    connection.connect((parts.hostname, parts.port))
    body = json.dumps({"prompt": "go", "stream": True, "max_tokens": 10**6}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def eventually(what: str, probe: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not probe():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def read_to_the_end(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


def held(server: Server) -> int:
    """The most that a connection's own buffer holds."""
    connections = list(server.server_state.connections)
    return max((c.transport.get_write_buffer_size() for c in connections if c.transport), default=0)


def test_its_backlog_is_bounded_and_beyond_it_the_client_is_dropped() -> None:
    engine = Endless()
    with serving(engine, Config(server=ServerConfig(slow_reader_s=60, stream_buffer_bytes=BUFFER))) as (url, server):
        with ExitStack() as stack:
            stuck = [reader(url, stack) for _ in range(4)]
            most = kept = 0

            def dropped() -> bool:
                nonlocal most, kept
                most, kept = max(most, engine.waiting), max(kept, held(server))
                return len(engine.cancelled) == len(stuck)

            eventually("all are dropped", dropped)
            assert 0 < most <= BUFFER
            assert CONNECTION - EVENT <= kept <= CONNECTION + EVENT + FRAME
            for connection in stuck:
                with pytest.raises(ConnectionResetError):
                    read_to_the_end(connection)
        eventually("no connection is left", lambda: not server.server_state.connections)


def test_one_that_reads_a_byte_now_and_then_is_dropped_in_time_and_others_never_wait() -> None:
    engine = Endless()
    with serving(engine, Config(server=ServerConfig(slow_reader_s=SLOW_S, stream_buffer_bytes=1 << 40))) as (url, _):
        with ExitStack() as stack:
            slow = [reader(url, stack) for _ in range(3)]
            eager = reader(url, stack, window=1 << 20)
            eventually("all run", lambda: len(engine.streams) == 4)
            got = 0

            def dropped() -> bool:
                nonlocal got
                for connection in slow:
                    connection.setblocking(False)
                    with suppress(BlockingIOError, ConnectionResetError):
                        connection.recv(1)
                got += len(eager.recv(1 << 20))
                return len(engine.cancelled) == 3

            before = got
            eventually("the slow ones are dropped", dropped)
            assert got - before > 10 * EVENT
            assert eager.recv(1 << 20)
        eventually("the eager one has left too", lambda: len(engine.cancelled) == 4)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_what_comes_while_nobody_could_read_it_drops_nobody(anyio_backend: str, stream: bool) -> None:
    """All output of the first prompts is there before the last is accepted, and more than the limit."""
    engine = FakeEngine()
    engine.answer = "y" * 100
    app = build_app(engine, Config(server=ServerConfig(stream_buffer_bytes=4 * KIB)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        body = {"prompt": ["a", "b", "c"], "stream": stream, "logprobs": 1, "max_tokens": 100}
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.text.count('"finish_reason":"stop"') == 3
    assert not engine.cancelled


def test_one_that_has_gone_while_its_backlog_grew_over_the_limit_disturbs_nobody() -> None:
    failed: list[dict[str, Any]] = []

    async def overrun_when_lost(server: Server, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        connection.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while connection in server.server_state.connections:
                await asyncio.sleep(0)
        connection._overrun()
        await asyncio.sleep(0)  # until it has been told

    with serving(Endless(), Config()) as (url, server), ExitStack() as stack:
        reader(url, stack).recv(1)
        (connection,) = server.server_state.connections
        running = overrun_when_lost(server, connection)
        asyncio.run_coroutine_threadsafe(running, connection.loop).result(PATIENCE_S)
    assert not failed


def test_a_whole_answer_that_nobody_reads_is_dropped_too() -> None:
    engine = FakeEngine()
    engine.answer = "y"
    with serving(engine, Config(server=ServerConfig(slow_reader_s=SLOW_S))) as (url, server), ExitStack() as stack:
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
        parts = urlsplit(url)
        connection.connect((parts.hostname, parts.port))
        for _ in range(60):  # pipelined, so that many answers pile up
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
        eventually("it piles up", lambda: held(server) > 0)
        eventually("it is dropped", lambda: not server.server_state.connections)


@pytest.mark.parametrize("endless", [b"GET /" + b"a" * KIB, b"x" * KIB, b"x-many: 1\r\n" * 100])
def test_a_head_without_end_is_cut_off(endless: bytes) -> None:
    """A long first line, one long header, many headers: in a connection's first request and in a later one."""
    engine = FakeEngine()
    with serving(engine, Config()) as (url, server), ExitStack() as stack:
        for before in (b"", b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(PATIENCE_S)
            parts = urlsplit(url)
            connection.connect((parts.hostname, parts.port))
            connection.sendall(before + (b"" if endless.startswith(b"GET") else b"GET /ping HTTP/1.1\r\nx-long: "))
            cut_off(connection, endless, 4 * 1024 * KIB)
        eventually("no connection is left", lambda: not server.server_state.connections)


def cut_off(connection: socket.socket, endless: bytes, most: int) -> None:
    """Send the same again and again: the server must end the connection before `most` bytes."""
    sent = 0
    with suppress(ConnectionError):
        while sent < most:
            connection.sendall(endless)
            sent += len(endless)
    assert sent < most, "it was taken without end"


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "endless"),
    [
        (b"2\r\n{}\r\n0\r\n", b"x-many: 1\r\n" * 100),
        (b"2\r\n{}\r\n0\r\nx-long: ", b"x" * KIB),
        (b"2;x=", b"x" * KIB),
    ],
)
def test_what_a_body_has_beside_itself_is_cut_off_too(begun: bytes, endless: bytes) -> None:
    """Many trailers, one long trailer, a chunk with a long head."""
    with serving(FakeEngine(), Config()) as (url, server), ExitStack() as stack:
        parts = urlsplit(url)
        connection = stack.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0)))
        connection.settimeout(PATIENCE_S)
        connection.sendall(CHUNKED + begun)
        cut_off(connection, endless, 16 * 1024 * KIB)
        eventually("no connection is left", lambda: not server.server_state.connections)


def test_a_trailer_is_no_header_and_a_body_in_many_chunks_is_read(engine: FakeEngine) -> None:
    body = json.dumps({"prompt": "x" * 150, "max_tokens": 1}).encode()
    chunks = b"".join(b"1;%s\r\n%c\r\n" % (b"y" * KIB, byte) for byte in body)
    assert len(chunks) > 128 * KIB
    with serving(engine, Config()) as (url, _), ExitStack() as stack:
        parts = urlsplit(url)
        connection = stack.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0)))
        connection.settimeout(PATIENCE_S)
        connection.sendall(CHUNKED + chunks + b"0\r\nx-request-id: trailed\r\ncontent-type: text/html\r\n\r\n")
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += connection.recv(64 * KIB)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"trailed" not in answer


def test_a_head_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEAD_S", 0.2)
    with serving(FakeEngine(), Config()) as (url, server), ExitStack() as stack:
        parts = urlsplit(url)
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"):
            connection = stack.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0)))
            connection.sendall(begun)
        eventually("both are gone", lambda: not server.server_state.connections)
        assert httpx.get(f"{url}/ping").status_code == 200
