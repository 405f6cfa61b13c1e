"""Two hundred clients of one daemon, and what the bad ones among them cost the others: nothing but bounded memory."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from tests.processes.daemon import Daemon, daemon, eventually

pytestmark = pytest.mark.anyio

NORMAL, SLOW, LEAVING = 130, 20, 50
TOKENS = 30
BODY: dict[str, Any] = {"prompt": "go", "stream": True, "temperature": 0}
LIMIT = 2 * 1024 * 1024
CONNECTION = 64 * 1024
EVENT = 4 * 1024
"""More than one event here has."""
KERNEL = 256 * 1024
"""Linux keeps twice what SO_SNDBUF asks for."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def asked(address: str, stack: ExitStack) -> socket.socket:
    """A stream of about 540 KB, more than is held on its way, for a client with a small window."""
    parts = urlsplit(address)
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((parts.hostname, parts.port))
    body = json.dumps({**BODY, "max_tokens": 1800, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    connection.setblocking(False)
    return connection


def queued(port: int) -> list[int]:
    """Bytes that the kernel holds of each connection of the gateway's that is not read (proc(5), /proc/net/tcp)."""
    with open(f"/proc/{os.getpid()}/net/tcp") as file:  # noqa: PTH123 - a path of the kernel's
        rows = [line.split() for line in file.readlines()[1:]]
    return [int(row[4].partition(":")[0], 16) for row in rows if int(row[1].partition(":")[2], 16) == port]


def gateway(running: Daemon) -> dict[str, int]:
    return running.actors()["gateway"].stats


async def text(client: httpx.AsyncClient, texts: list[str]) -> None:
    found = ""
    async with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": TOKENS}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0]["text"]
    texts.append(found)


async def test_nobody_waits_for_those_who_read_a_byte_a_second_or_leave() -> None:
    """The slow ones are never dropped here, so all others are served beside connections that are full."""
    settings = ("scheduler.max_sequences=256", "kv.tokens=400000", "server.slow_reader_s=600")
    with daemon(*settings, f"server.stream_buffer_bytes={LIMIT}", gateway=True) as running, ExitStack() as stack:
        await anyio.to_thread.run_sync(running.wait_ready)
        address = running.info().address
        assert address is not None
        texts: list[str] = []
        limits = httpx.Limits(max_connections=NORMAL)
        async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
            await text(client, texts)
            slow = [asked(address, stack) for _ in range(SLOW)]
            await anyio.to_thread.run_sync(
                eventually, "they are full", lambda: gateway(running).get("buffer_most", 0) > 0
            )

            async def read_a_byte_a_second() -> None:
                while True:
                    await anyio.sleep(1)
                    assert all(connection.recv(1) for connection in slow), "one was dropped"

            async def leave(number: int) -> None:
                with ExitStack() as own:
                    asked(address, own)
                    await anyio.sleep(0.01 * number)

            async with anyio.create_task_group() as bad:
                bad.start_soon(read_a_byte_a_second)
                async with anyio.create_task_group() as others:
                    for number in range(LEAVING):
                        others.start_soon(leave, number)
                    for _ in range(NORMAL):
                        others.start_soon(text, client, texts)
                bad.cancel_scope.cancel()
        assert len(texts) == 1 + NORMAL
        assert len(texts[0]) == TOKENS
        assert set(texts) == {texts[0]}, "whole answers, and nobody else's"
        assert "a slow reader is dropped" not in running.log

        def said() -> bool:
            return gateway(running).get("backlog_most", 0) > 0

        await anyio.to_thread.run_sync(eventually, "what waits for them is told", said)
        stats = gateway(running)
        assert CONNECTION - EVENT <= stats["buffer_most"] <= CONNECTION + EVENT
        assert stats["backlog_most"] <= LIMIT
        held = sorted(queued(urlsplit(address).port or 0))[-SLOW:]
        assert 0 < held[0] <= held[-1] <= KERNEL
        stack.close()

        def idle() -> bool:
            numbers = running.actors()["scheduler"].stats
            return numbers["running"] == numbers["waiting"] == 0 and gateway(running)["open"] == 0

        await anyio.to_thread.run_sync(eventually, "nothing of theirs goes on", idle)
