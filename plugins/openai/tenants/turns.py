"""Whose turn it is: how many answers are given at a time, and who waits, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio


class NoTurn(Exception):
    """There is neither a turn nor a place to wait; `limit` says which of the two is used up."""

    def __init__(self, limit: str, most: int) -> None:
        super().__init__(limit)
        self.limit = limit
        self.most = most


@dataclass(eq=False, slots=True)
class _Place:
    size: int
    called: anyio.Event = field(default_factory=anyio.Event)


class Turns:
    """At most `concurrency` at a time (None: no matter), at most `queue` waiting. For one event loop."""

    def __init__(self, concurrency: int | None, queue: int) -> None:
        self._concurrency = concurrency
        self._queue = queue
        self.running = 0
        self._waiting: deque[_Place] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for it, hold it. Something larger than all turns together takes them all. Raises `NoTurn`."""
        if self._concurrency is None:
            yield
            return
        size = min(size, self._concurrency)
        await self._begin(size, self._concurrency)
        try:
            yield
        finally:
            self._end(size)

    async def _begin(self, size: int, concurrency: int) -> None:
        if not self._waiting and self.running + size <= concurrency:
            self.running += size
            return
        if len(self._waiting) >= self._queue:
            raise NoTurn("queue", self._queue) if self._queue else NoTurn("concurrency", concurrency)
        place = _Place(size)
        self._waiting.append(place)
        try:
            await place.called.wait()
        except BaseException:
            if place.called.is_set():  # called and gone in the same moment
                self._end(size)
            else:
                self._waiting.remove(place)
                self._call()
            raise

    def _end(self, size: int) -> None:
        self.running -= size
        self._call()

    def _call(self) -> None:
        assert self._concurrency is not None  # else nobody waits
        while self._waiting and self.running + self._waiting[0].size <= self._concurrency:
            place = self._waiting.popleft()
            self.running += place.size
            place.called.set()
