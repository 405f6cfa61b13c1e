"""How fast a choice's rows come, seen from one place: by the tokenizer as it sends them, by the client as it takes
them. The same rule on both sides, so that the two can be compared. Knows no clock: it is told the time.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.messages import Times


class Pace:
    """Follows the rows of one choice of a request that was received at `received_ns`."""

    __slots__ = ("_first_ns", "_last_ns", "_longest_ns", "_received_ns", "_rows")

    def __init__(self, received_ns: int) -> None:
        self._received_ns = received_ns
        self._rows = self._first_ns = self._last_ns = self._longest_ns = 0

    def row(self, now_ns: int) -> None:
        """A row with ids."""
        if not self._rows:
            self._first_ns = now_ns
        elif now_ns - self._last_ns > self._longest_ns:
            self._longest_ns = now_ns - self._last_ns
        self._rows += 1
        self._last_ns = now_ns

    def end(self, now_ns: int) -> Times:
        """The choice has ended, with the last row or after it."""
        received = self._received_ns
        if not self._rows:
            return Times(0, 0, 0, 0, now_ns - received)
        return Times(
            self._rows, self._first_ns - received, self._last_ns - received, self._longest_ns, now_ns - received
        )


class Latencies(NamedTuple):
    """The usual measures, in ns; None where there is too little to measure."""

    ttft: int | None
    itl: int | None
    longest: int | None
    tpot: int | None
    e2e: int


def latencies(times: Times, tokens: int) -> Latencies:
    """Of a choice with so many output tokens."""
    span = times.last_ns - times.first_ns
    several = times.rows > 1
    return Latencies(
        ttft=times.first_ns if times.rows else None,
        itl=span // (times.rows - 1) if several else None,
        longest=times.longest_ns if several else None,
        tpot=span // (tokens - 1) if times.rows and tokens > 1 else None,
        e2e=times.end_ns,
    )


def off(ours: int | None, theirs: int | None) -> int | None:
    """The difference, where both are known."""
    return None if ours is None or theirs is None else ours - theirs
