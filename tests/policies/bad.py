"""Policies that break the contract, each in one way. The kit and the guard must catch every one."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from octavo.policies.contract import Floats, Ints, Leaves, Observed, Running, Selection, Step, Waiting


def everyone(waiting: Waiting) -> Ints:
    return np.arange(len(waiting), dtype=np.int32)


class Raises:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(everyone(waiting)[[0]])


class Duplicates:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(np.concatenate([everyone(waiting), everyone(waiting)]))


class OutOfRange:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(everyone(waiting) + 1)


class Fractions:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(everyone(waiting) / 2)  # type: ignore[arg-type]


class ReturnsAList:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return list(range(len(waiting)))  # type: ignore[return-value]


class AdmitsAndRefuses:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(everyone(waiting), refuse=everyone(waiting)[:1])


class ShortMask:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(everyone(waiting), decode=np.ones(3, dtype=np.bool_))


class Hangs:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        time.sleep(60)
        return Selection(everyone(waiting))


class Slow:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        for i, j in itertools.product(range(len(waiting)), range(len(waiting))):
            _ = waiting.arrival_ns[i] < waiting.arrival_ns[j]
        return Selection(everyone(waiting))


class Mutates:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        waiting.known[:] = 0
        return Selection(everyone(waiting))


class MutatesByForce:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        waiting.known.flags.writeable = True
        waiting.known[:] = 0
        return Selection(everyone(waiting))


class Dices:
    def __init__(self) -> None:
        self._draw = np.random.default_rng()

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(self._draw.permutation(len(waiting)).astype(np.int32))


class StarvesLong:
    """Never admits a long prompt."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(np.flatnonzero(waiting.known < 100).astype(np.int32), when_blocked="skip")


class StarvesDecodes:
    """Lets nobody of the first tenant decode."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(everyone(waiting), "skip", decode=running.tenant != 0)


class ObserveRaises:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(everyone(waiting))

    def observe(self, observed: Observed) -> None:
        raise KeyError(int(observed.duration_ns[0]))


class OverBudget:
    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        return remaining


class NoProgress:
    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        return np.zeros_like(remaining)


class NanScores:
    def rank(self, need: int, leaves: Leaves) -> Floats:
        return np.where(leaves.hits == 0, np.nan, 1.0)


class TooFewScores:
    def rank(self, need: int, leaves: Leaves) -> Floats:
        return np.zeros(need)


class NegativeVictims:
    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        return np.asarray([-1], dtype=np.int32)


class NegativeDrafts:
    def draft_lengths(self, step: Step, running: Running) -> Ints:
        return running.output_left - 5000


BAD: list[tuple[str, type[Any], str]] = [
    ("batching", Raises, "raises IndexError"),
    ("batching", Duplicates, "admit must be distinct; 0 comes 2 times"),
    ("batching", OutOfRange, "admit must be indices from 0 to 0; 1 is not"),
    ("batching", Fractions, "admit must be 1 integers, not float64"),
    ("batching", ReturnsAList, "select must return a Selection, not list"),
    ("batching", AdmitsAndRefuses, "both in admit and in refuse"),
    ("batching", ShortMask, "decode must be a mask of shape"),
    ("batching", Hangs, "has not answered after"),
    ("batching", Slow, "use numpy on whole columns"),
    ("batching", Mutates, "tries to change what it is shown"),
    ("batching", MutatesByForce, "changed a column"),
    ("batching", Dices, "numpy.random.default_rng"),
    ("batching", StarvesLong, "what has waited long go first"),
    ("batching", StarvesDecodes, "what has waited long go first"),
    ("batching", ObserveRaises, "raises KeyError"),
    ("chunking", OverBudget, "exceed|sum to"),
    ("chunking", NoProgress, "what has waited long go first"),
    ("eviction", NanScores, "scores must be finite"),
    ("eviction", TooFewScores, "scores must be 50 numbers"),
    ("preemption", NegativeVictims, "victims must be indices from 0"),
    ("speculation", NegativeDrafts, "draft lengths must be at least 0"),
    ("speculation", OverBudget, "it has no method draft_lengths"),
]
"""(group, policy, what its author is told)."""
