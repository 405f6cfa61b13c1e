"""The sequences without a slot, in order of arrival, and the window of them that a batching policy sees.

When more wait than the window holds, half of it are those that arrived first. The other half is for whoever is urgent
in some way that policies go by, wherever in the queue: by priority, by deadline, by the least work left, by the longest
cached prefix, and the first one of every tenant. These orders are kept as sequences come and go, so that filling the
window costs as much as the window is large, however many wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

import numpy as np

from octavo.core.scheduler.sequence import Sequence
from octavo.core.scheduler.slots import deadline
from octavo.policies.contract import NEVER, Waiting

Arrival: TypeAlias = int
"""A sequence's place in `Sequence.order`, as one number: requests are numbered in order of arrival."""

CHOICES = 20
"""Bits for the choice in an `Arrival`."""


def _arrival(sequence: Sequence) -> Arrival:
    return (sequence.request.order << CHOICES) + sequence.choice


class _Row(NamedTuple):
    """A sequence's values in the view, by column."""

    arrival_ns: int
    known: int
    cached: int
    output_left: int
    priority: int
    deadline_ns: int
    tenant: int
    preemptions: int

    @classmethod
    def of(cls, sequence: Sequence) -> _Row:
        request = sequence.request
        known = len(sequence.tokens)
        return cls(
            request.arrival_ns, known, sequence.hint or 0, request.limit - known, request.asked.priority,
            deadline(request.asked.deadline_ns), request.tenant, sequence.preemptions,
        )  # fmt: skip

    @property
    def urgencies(self) -> tuple[int | None, ...]:
        """In each of `Queue`'s orders, lowest first; None: not urgent in this way."""
        return (
            -self.priority,
            None if self.deadline_ns == NEVER else self.deadline_ns,
            self.known - self.cached + self.output_left,
            -self.cached or None,
        )


class Queue:
    """Ordered by arrival, so that a preempted sequence comes back before those that arrived after it."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._arrivals: list[Arrival] = []
        self._sequences: dict[Arrival, Sequence] = {}
        self._rows: dict[Arrival, _Row] = {}
        self._urgent: tuple[list[tuple[int, Arrival]], ...] = ([], [], [], [])
        """(urgency, arrival) in every order, sorted."""
        self._of_tenant: dict[int, list[Arrival]] = {}
        self._firsts: list[Arrival] = []
        """Each tenant's first, sorted."""
        self._head: list[Sequence] = []
        self._view: Waiting | None = None

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        return map(self._sequences.__getitem__, self._arrivals)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[self._arrivals[0]] if self._arrivals else None

    def add(self, sequence: Sequence) -> None:
        arrival = _arrival(sequence)
        insort(self._arrivals, arrival)
        self._sequences[arrival] = sequence
        self._note(arrival, _Row.of(sequence))

    def remove(self, sequence: Sequence) -> None:
        arrival = _arrival(sequence)
        if self._sequences.get(arrival) is not sequence:
            raise KeyError(f"{sequence.request.id} choice {sequence.choice} is not waiting")
        del self._arrivals[bisect_left(self._arrivals, arrival)]
        del self._sequences[arrival]
        self._forget(arrival)

    def changed(self, sequence: Sequence) -> None:
        """One that waits has other values now: a hint, or late tokens."""
        arrival = _arrival(sequence)
        self._forget(arrival)
        self._note(arrival, _Row.of(sequence))

    def head(self) -> list[Sequence]:
        """The sequences that `view` shows, in its order."""
        self.view()
        return self._head

    def view(self) -> Waiting:
        """Frozen columns of the window; made anew only when something changed."""
        if self._view is None:
            shown = self._arrivals if len(self._arrivals) <= self._window else self._shown()
            self._head = [self._sequences[arrival] for arrival in shown]
            self._view = _columns([self._rows[arrival] for arrival in shown])
        return self._view

    # ── the window ───────────────────────────────────────────────────────────────────────────────

    def _shown(self) -> list[Arrival]:
        """As many as the window holds, oldest first."""
        rest = self._window // 2
        part = -(-rest // (len(self._urgent) + 1))
        shown = set(self._arrivals[: self._window - rest])
        for order in self._urgent:
            self._admit(shown, (arrival for _, arrival in order), part)
        self._admit(shown, self._firsts, part)
        self._admit(shown, self._arrivals, self._window)
        return sorted(shown)

    def _admit(self, shown: set[Arrival], order: Iterable[Arrival], most: int) -> None:
        """The first `most` of the order that are not shown yet, as far as there is room."""
        most = min(most, self._window - len(shown))
        shown.update(list(islice((arrival for arrival in order if arrival not in shown), most)))

    def _note(self, arrival: Arrival, row: _Row) -> None:
        self._view = None
        self._rows[arrival] = row
        for order, urgency in zip(self._urgent, row.urgencies, strict=True):
            if urgency is not None:
                insort(order, (urgency, arrival))
        own = self._of_tenant.setdefault(row.tenant, [])
        before = own[0] if own else None
        insort(own, arrival)
        self._move_first(before, own[0])

    def _forget(self, arrival: Arrival) -> None:
        self._view = None
        row = self._rows.pop(arrival)
        for order, urgency in zip(self._urgent, row.urgencies, strict=True):
            if urgency is not None:
                del order[bisect_left(order, (urgency, arrival))]
        own = self._of_tenant[row.tenant]
        before = own[0]
        del own[bisect_left(own, arrival)]
        self._move_first(before, own[0] if own else None)
        if not own:
            del self._of_tenant[row.tenant]

    def _move_first(self, before: Arrival | None, now: Arrival | None) -> None:
        """A tenant's first is another one."""
        if before == now:
            return
        if before is not None:
            del self._firsts[bisect_left(self._firsts, before)]
        if now is not None:
            insort(self._firsts, now)


def _columns(rows: list[_Row]) -> Waiting:
    width = len(_Row._fields)
    values = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=width * len(rows))
    table = np.ascontiguousarray(values.reshape(-1, width).T)
    narrow, wide = table.astype(np.int32), table[[0, 5]]
    narrow.flags.writeable = wide.flags.writeable = False
    _, known, cached, output_left, priority, _, tenant, preemptions = narrow
    return Waiting(wide[0], known, cached, output_left, priority, wide[1], tenant, preemptions)
