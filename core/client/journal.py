"""What of one request has been delivered to its consumer: the law of exactly once.

A row is taken only if it belongs to the current attempt and starts where its choice's journal ends. So whatever
is lost, doubled or late on the way, no token is delivered twice and none is left out: a row that comes again is
dropped, and one that comes too early says that something is missing and the request must be resumed.

Pure: knows no sockets, no clocks, no consumers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from octavo.core.messages import Delivered

if TYPE_CHECKING:
    from octavo.core.messages import Row


class Verdict(Enum):
    TAKEN = "taken"
    """The row is next: hand it to the consumer."""
    DROPPED = "dropped"
    """Delivered before, or of an attempt that is over."""
    GAP = "gap"
    """A row before this one is missing: resume the request."""


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    finish: str | None = None


class Journal:
    """The journal of one request with `n` choices; attempt 0 is its first submission."""

    __slots__ = ("_choices", "attempt")

    def __init__(self, n: int) -> None:
        self.attempt = 0
        self._choices = [_Choice() for _ in range(n)]

    def take(self, row: Row) -> Verdict:
        """Whether `row` continues its choice; if so it is written down."""
        if row.attempt != self.attempt or not 0 <= row.choice < len(self._choices):
            return Verdict.DROPPED
        choice = self._choices[row.choice]
        if choice.finish is not None or row.index < len(choice.ids):
            return Verdict.DROPPED
        if row.index > len(choice.ids):
            return Verdict.GAP
        if not row.ids and row.finish is None:
            # It would not move the journal on, so its double could not be told from it.
            return Verdict.DROPPED
        choice.ids += row.ids
        choice.finish = row.finish
        return Verdict.TAKEN

    def resume(self) -> list[Delivered]:
        """Begin the next attempt; what it is to be told of the past. Rows of earlier attempts are dropped from now."""
        self.attempt += 1
        return [Delivered(i, list(c.ids), c.finish is not None) for i, c in enumerate(self._choices)]

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return all(choice.finish is not None for choice in self._choices)
