"""Do two samples of tokens come from one distribution? A two-sample chi-square test, without a table of quantiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_FEW = 10
"""Tokens seen more rarely in both samples together are counted as one."""


class Homogeneity(NamedTuple):
    statistic: float
    degrees: int

    @property
    def z(self) -> float:
        """The statistic as a standard normal deviate (Wilson & Hilferty, 1931); 0 where there is one kind only."""
        if self.degrees == 0:
            return 0.0
        spread = 2 / (9 * self.degrees)
        return float(((self.statistic / self.degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))

    @property
    def p(self) -> float:
        """How often samples of one distribution differ as much."""
        return 0.5 * math.erfc(self.z / math.sqrt(2))


def homogeneity(one: Sequence[int], other: Sequence[int]) -> Homogeneity:
    a, b = Counter(one), Counter(other)
    kinds = [token for token in a | b if a[token] + b[token] >= _FEW]
    rows = [(a[token], b[token]) for token in kinds]
    rest = len(one) - sum(row[0] for row in rows), len(other) - sum(row[1] for row in rows)
    if sum(rest):
        rows.append(rest)
    total = len(one) + len(other)
    statistic = 0.0
    for row in rows:
        for seen, size in zip(row, (len(one), len(other)), strict=True):
            expected = sum(row) * size / total
            statistic += (seen - expected) ** 2 / expected
    return Homogeneity(statistic, len(rows) - 1)
