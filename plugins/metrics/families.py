"""Counters, gauges and histograms, and Prometheus's text format of them (version 0.0.4).

A family has all its label values from the start, so that nothing appears or vanishes later. Knows nothing of Octavo.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    suffix: str
    labels: dict[str, str]
    value: float


class Family:
    """Base of the three. `label` is the one label whose values are counted apart, "" for none."""

    kind = ""

    def __init__(self, name: str, text: str, label: str = "", values: Iterable[str] = ("",)) -> None:
        self.name = name
        self.text = text
        self.label = label
        self.values = tuple(values)

    def samples(self) -> Iterator[Sample]:
        raise NotImplementedError

    def labels(self, value: str) -> dict[str, str]:
        return {self.label: value} if self.label else {}


class Counter(Family):
    """Only grows. By convention its name ends in `_total`."""

    kind = "counter"

    def __init__(self, name: str, text: str, label: str = "", values: Iterable[str] = ("",)) -> None:
        super().__init__(name, text, label, values)
        self._totals = dict.fromkeys(self.values, 0.0)

    def add(self, amount: float = 1, value: str = "") -> None:
        """ValueError if it would shrink; KeyError for a label value it does not have."""
        if amount < 0:
            raise ValueError(f"{self.name} cannot shrink by {-amount}")
        self._totals[value] += amount

    def total(self, value: str = "") -> float:
        return self._totals[value]

    def samples(self) -> Iterator[Sample]:
        for value, total in self._totals.items():
            yield Sample("", self.labels(value), total)


class Shares(Counter):
    """A counter whose label values are not known beforehand: the first `most` of them (and none at all, "") have a
    total of their own, all further ones share `other`."""

    OTHER = "other"

    def __init__(self, name: str, text: str, label: str, most: int) -> None:
        super().__init__(name, text, label, ("", self.OTHER))
        self._most = most

    def add(self, amount: float = 1, value: str = "") -> None:
        if value not in self._totals and len(self._totals) < self._most + 2:
            self._totals[value] = 0.0
        super().add(amount, value if value in self._totals else self.OTHER)


class Gauge(Family):
    """As it was last set."""

    kind = "gauge"

    def __init__(self, name: str, text: str, label: str = "", values: Iterable[str] = ("",)) -> None:
        super().__init__(name, text, label, values)
        self._now = dict.fromkeys(self.values, 0.0)

    def set(self, amount: float, value: str = "") -> None:
        """KeyError for a label value it does not have."""
        if value not in self._now:
            raise KeyError(f"{self.name} has no {self.label} {value!r}")
        self._now[value] = amount

    def samples(self) -> Iterator[Sample]:
        for value, now in self._now.items():
            yield Sample("", self.labels(value), now)


class Histogram(Family):
    """Counts by upper bound (inclusive), with their sum."""

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: Iterable[float]) -> None:
        super().__init__(name, text)
        self.bounds = (*sorted(bounds), math.inf)
        self._counts = [0] * len(self.bounds)
        self.sum = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self.bounds, amount)] += 1
        self.sum += amount

    @property
    def count(self) -> int:
        return sum(self._counts)

    def samples(self) -> Iterator[Sample]:
        below = 0
        for bound, count in zip(self.bounds, self._counts, strict=True):
            below += count
            yield Sample("_bucket", {"le": _number(bound)}, below)
        yield Sample("_sum", {}, self.sum)
        yield Sample("_count", {}, below)


class Cumulative(Histogram):
    """A histogram that somebody else fills, told how much it grew."""

    def add(self, counts: Iterable[int], total: float) -> None:
        """How many values more there are in each bucket, and their sum."""
        self._counts = [known + more for known, more in zip(self._counts, counts, strict=True)]
        self.sum += total


def render(families: Iterable[Family], common: dict[str, str]) -> str:
    """The page; `common` labels go to every sample."""
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.text}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for suffix, labels, value in family.samples():
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**common, **labels}.items())
            lines.append(f"{family.name}{suffix}{{{pairs}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
