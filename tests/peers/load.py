"""The client: the same bytes to every server, and when each token came back. Bounded by the work and by a time-out."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.peers.prepare import NAME

LIMIT_S = 110.0
COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


class Call(NamedTuple):
    """A prompt of token ids, and how many tokens to generate, whatever they are."""

    prompt: list[int]
    tokens: int


class Timing(NamedTuple):
    """Of one call, in seconds of the same clock. `events` are the times at which something came."""

    sent: float
    events: list[float]
    tokens: int

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    @property
    def longest(self) -> float:
        """The longest pause after the first token."""
        return max((b - a for a, b in zip(self.events, self.events[1:], strict=False)), default=0.0)


async def call(port: int, one: Call) -> Timing:
    """Raises RuntimeError if the server does not give what was asked for."""
    body = {
        "model": NAME,
        "prompt": one.prompt,
        "max_tokens": one.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = ("Host: localhost", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(data)}")
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *fields, "", ""])
    sent = time.perf_counter()
    writer.write(head.encode() + data)
    events: list[float] = []
    received = bytearray()
    while piece := await reader.read(65536):
        now = time.perf_counter()
        received += piece
        if b'"text"' in piece:
            events.append(now)
        if b"data: [DONE]" in received[-64:]:  # not everybody closes the connection
            break
    writer.close()
    counts = COUNT.findall(received)
    if not counts or int(counts[-1]) != one.tokens or not events:
        raise RuntimeError(f"{counts[-1:]} tokens came of {one.tokens}: {bytes(received[:300])!r}")
    return Timing(sent, events, one.tokens)


async def together(port: int, calls: Sequence[Call], at_once: int) -> list[Timing]:
    """All calls in their order, at most `at_once` open."""
    free = asyncio.Semaphore(at_once)

    async def one(given: Call) -> Timing:
        async with free:
            return await call(port, given)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one(given)) for given in calls]
    return [task.result() for task in started]


def rate(timings: Sequence[Timing]) -> float:
    """Output tokens a second, from the first request to the last token."""
    begun, ended = min(t.sent for t in timings), max(t.events[-1] for t in timings)
    return sum(t.tokens for t in timings) / (ended - begun)
