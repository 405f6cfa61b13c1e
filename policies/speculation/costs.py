"""What a step takes, from the times of those seen: how much longer with more tokens than with fewer."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

_SIZES: tuple[int, ...] = (*range(1, 17), *(2**i * j // 4 for i in range(4, 10) for j in range(5, 9)))
"""Tokens of a step that are told apart; one between two of them is like the greater: executors compute in tiles."""
_OF = [bisect_left(_SIZES, tokens) for tokens in range(_SIZES[-1] + 1)]
_STEP = 0.05
"""Least part of a surprise that is learnt; more while little was seen."""
_FEW, _WIDE, _WIDEST = 4, 1.5, 0.25
"""Most of a surprise that counts, in logarithms: while few steps of a size were seen with guesses, and else, when a
greater one tells of what else held the machine."""
_AGE = 32
"""Steps after which one without guesses is made, to know what guesses are compared with."""
_APART = 8
"""So many steps may lie between two that are compared."""
LONG = 512
"""Steps after which a size's costs are unknown again."""


class Costs:
    """How much longer a step of so many tokens takes than one of fewer.

    Learnt from ratios of steps near each other in time, never from a time alone: what slows the machine for a while
    slows both of a pair. Of the ratios to the latest step of each other size the middle one counts. Sizes not seen are
    between those that were, in the first guess's proportions."""

    def __init__(self, token_cost: float) -> None:
        self._first = [math.log(1.0 + token_cost * tokens) for tokens in _SIZES]
        self._off = [0.0] * len(_SIZES)
        """What is added to the first guess, of sizes that were seen."""
        self._seen = [0] * len(_SIZES)
        self._compared: list[int] = []
        """The sizes of which anything was learnt, in order."""
        self._last: dict[int, tuple[int, float, set[int]]] = {}
        """Of the latest sizes: the step, the logarithm of its time, and the sizes that it was compared with."""
        self.steps = 0
        """Seen so far, of decodes alone."""
        self._now = 0
        """The number of the latest step of any kind."""
        self._at: dict[int, int] = {}
        """The step that was last of a size."""

    def ends(self, tokens: int, most: int) -> list[int]:
        """Numbers of further tokens, from 1 to `most`, of which a greater one makes a step of another size."""
        end = min(tokens + most, _SIZES[-1])
        if tokens >= end:
            return [1]
        return [min(size, end) - tokens for size in _SIZES[_OF[tokens + 1] : _OF[end] + 1]]

    def paid(self, tokens: int, more: Iterable[int]) -> list[float]:
        """What steps of so many more than `tokens` take over what one of `tokens` does: never less, whatever was seen.
        Else guesses would pay that are all wrong."""
        last = _SIZES[-1]
        size = self._size(tokens)
        least = self._known(size)
        if tokens < _SIZES[size]:
            below = _SIZES[size - 1]
            least += (self._known(size - 1) - least) * (_SIZES[size] - tokens) / (_SIZES[size] - below)
        return [
            math.exp(max(0.0, self._known(self._size(tokens + n)) - least)) * max(1.0, (tokens + n) / max(tokens, last))
            for n in more
        ]

    def _known(self, size: int) -> float:
        """The logarithm of what a step of this size takes, but for a summand that all sizes have."""
        at, compared = bisect_left(self._compared, size), self._compared
        if not compared:
            return self._first[size]
        if at == len(compared) or at == 0 or compared[at] == size:
            return self._first[size] + self._off[compared[min(at, len(compared) - 1)]]
        below, above = compared[at - 1], compared[at]
        part = (_SIZES[size] - _SIZES[below]) / (_SIZES[above] - _SIZES[below])
        return self._first[size] + self._off[below] + part * (self._off[above] - self._off[below])

    def fresh(self, tokens: int) -> bool:
        """Whether a step of so many was seen lately, or none at all."""
        return self.steps - self._at.get(self._size(tokens), 0) < _AGE

    def known(self, tokens: int) -> bool:
        """Whether steps of so many or more were seen, not too long ago and not only one: that may have been slow."""
        least = self._size(tokens)
        lately = [size for size, at in self._at.items() if size >= least and self.steps - at < LONG]
        return sum(self._seen[size] for size in lately) > 1

    def interrupted(self) -> None:
        """A step of another kind came between."""
        self._now += 1

    def learn(self, tokens: int, more: int, took_ns: int) -> None:
        """A step of so many tokens and so many guesses."""
        self.steps += 1
        self._now += 1
        here, now = self._size(tokens + more), math.log(max(1, took_ns))
        self._at[here] = self.steps
        guessed = len(self._compared) > 1  # from sizes that were compared
        if not self._seen[here]:
            self._off[here] = self._known(here) - self._first[here]
        surprises: list[float] = []
        for there, (at, then, met) in list(self._last.items()):
            if self._now - at > _APART:
                del self._last[there]
            elif there != here and (more or here not in met):  # a step of guesses that was slow is told of once
                met.add(here)
                expected = self._first[here] + self._off[here] - self._first[there] - self._off[there]
                surprises.append(now - then - expected)
        self._last[here] = self._now, now, set()
        if not surprises:
            return
        few = self._seen[here] < _FEW and (more > 0 or self.steps <= _AGE)
        widest = _WIDE if few else _WIDEST
        surprise = min(max(sorted(surprises)[len(surprises) // 2], -widest), widest)
        # Of few with guesses the quickest counts: what is thought too dear is not made again, and so never seen to be
        # cheap. Not of those without: were they thought too cheap, no guess would pay.
        self._off[here] += surprise * (
            1.0 if few and more and surprise < 0 else max(_STEP, 1 / (1 + (guessed and not more) + self._seen[here]))
        )
        if not self._seen[here]:
            insort(self._compared, here)
        self._seen[here] += 1

    @staticmethod
    def _size(tokens: int) -> int:
        return _OF[min(tokens, len(_OF) - 1)]
