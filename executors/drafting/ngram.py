"""Drafter `ngram`: what followed the last time that the sequence said the same few tokens.

Prompt lookup (Saxena, 2023): for answers that repeat their prompt or themselves, such as edits, quotes and extracts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from weakref import WeakKeyDictionary

import msgspec

from octavo.executors.drafting.contract import NO_DRAFT, Draft, Drafter, DrafterOptions, Host, Want
from octavo.executors.drafting.trust import promised
from octavo.executors.residents import Resident


class _Index:
    """Where each n-gram of a sequence ended last, of those that something followed."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.upto = 0
        """N-grams that end before this position are in."""


class Ngram(Drafter):
    class Options(DrafterOptions, frozen=True):
        longest: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4
        """Tokens that are looked up together; fewer if so many were not seen before."""
        shortest: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1

        def __post_init__(self) -> None:
            if self.shortest > self.longest:
                raise ValueError(f"shortest ({self.shortest}) is above longest ({self.longest})")

    def __init__(self, host: Host, options: Options) -> None:
        self._options = options
        self._indices: WeakKeyDictionary[Resident, _Index] = WeakKeyDictionary()

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [self._one(want.resident, want.most) for want in wants]

    def _one(self, resident: Resident, most: int) -> Draft:
        tokens = resident.tokens
        index = self._indices.setdefault(resident, _Index())
        self._extend(index, tokens)
        for n in range(min(self._options.longest, len(tokens)), self._options.shortest - 1, -1):
            end = index.ends.get(tuple(tokens[-n:]))
            if end is not None:
                sure = n == self._options.longest
                return Draft(continued(tokens, end + 1, most if sure else promised(n, most)))
        return NO_DRAFT

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        longest, shortest = self._options.longest, self._options.shortest
        for end in range(index.upto, len(tokens) - 1):
            for n in range(shortest, min(longest, end + 1) + 1):
                index.ends[tuple(tokens[end + 1 - n : end + 1])] = end
        index.upto = max(index.upto, len(tokens) - 1)


def continued(tokens: list[int], at: int, most: int) -> list[int]:
    """`most` tokens from position `at` on, as if the sequence went on as it did there: past its end come those just
    copied, so that a repetition is continued for ever."""
    period = len(tokens) - at
    return [tokens[at + i % period] for i in range(most)]
