"""The sequences without a slot, in order of arrival, and the window of them that a batching policy sees."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from octavo.core.scheduler.sequence import Sequence
from octavo.core.scheduler.slots import deadline
from octavo.policies.contract import Ints, Times, Waiting

_ORDER = attrgetter("order")


class Queue:
    """Ordered by arrival, so that a preempted sequence comes back before those that arrived after it."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._sequences: list[Sequence] = []
        self._view: Waiting | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_ORDER)
        self._view = None

    def remove(self, sequence: Sequence) -> None:
        at = bisect_left(self._sequences, sequence.order, key=_ORDER)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise KeyError(f"{sequence.request.id} choice {sequence.choice} is not waiting")
        del self._sequences[at]
        self._view = None

    def changed(self) -> None:
        """A waiting sequence's columns changed (a hint came)."""
        self._view = None

    def head(self) -> list[Sequence]:
        """The sequences that `view` shows, in its order."""
        return self._sequences[: self._window]

    def view(self) -> Waiting:
        """Frozen columns of the head; rebuilt only when something changed."""
        if self._view is None:
            head = self.head()
            self._view = Waiting(
                arrival_ns=_times([s.request.arrival_ns for s in head]),
                known=_ints([len(s.tokens) for s in head]),
                cached=_ints([s.hint or 0 for s in head]),
                output_left=_ints([s.request.limit - len(s.tokens) for s in head]),
                priority=_ints([s.request.asked.priority for s in head]),
                deadline_ns=_times([deadline(s.request.asked.deadline_ns) for s in head]),
                tenant=_ints([s.request.tenant for s in head]),
                preemptions=_ints([s.preemptions for s in head]),
            )
        return self._view


def _ints(values: list[int]) -> Ints:
    column = np.asarray(values, dtype=np.int32)
    column.flags.writeable = False
    return column


def _times(values: list[int]) -> Times:
    column = np.asarray(values, dtype=np.int64)
    column.flags.writeable = False
    return column
