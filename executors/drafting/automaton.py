"""The longest suffix of a sequence that was said before, in constant time a token, however long it is.

A suffix automaton (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985): at most two
states a token of the text. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Automaton:
    """Over a text that grows. A state stands for the substrings that end at the same places of it; state 0 for none."""

    def __init__(self, text: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        """Of the longest substring of the state."""
        self._end = [0]
        """Where in the text the state's substrings ended first (exclusive)."""
        self._last = 0
        """The state of the whole text."""
        self.extend(text)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._add(token)

    def repeated(self) -> tuple[int, int]:
        """The longest suffix of the text that was in it before: where it ended first, and its length (0: none)."""
        state = self._link[self._last] if self._last else 0
        return self._end[state], self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow another sequence by a token: from the longest suffix of it that is in this text (its state and length)
        to the next one. Begins at (0, 0)."""
        while state and token not in self._next[state]:
            state = self._link[state]
            length = min(length, self._length[state])
        if token not in self._next[state]:
            return 0, 0
        return self._next[state][token], length + 1

    def end(self, state: int) -> int:
        """Where in the text the state's substrings ended first."""
        return self._end[state]

    def _add(self, token: int) -> None:
        self.text.append(token)
        nexts, links, lengths, ends = self._next, self._link, self._length, self._end
        here, new = self._last, len(nexts)
        nexts.append({})
        lengths.append(lengths[here] + 1)
        ends.append(len(self.text))
        links.append(0)
        self._last = new
        while here >= 0 and token not in nexts[here]:
            nexts[here][token] = new
            here = links[here]
        if here >= 0:
            there = nexts[here][token]
            links[new] = there if lengths[there] == lengths[here] + 1 else self._split(here, there, token)

    def _split(self, here: int, there: int, token: int) -> int:
        """The part of state `there` that also ends elsewhere, as a state of its own."""
        clone = len(self._next)
        self._next.append(dict(self._next[there]))
        self._length.append(self._length[here] + 1)
        self._link.append(self._link[there])
        self._end.append(self._end[there])
        self._link[there] = clone
        while here >= 0 and self._next[here].get(token) == there:
            self._next[here][token] = clone
            here = self._link[here]
        return clone


def after(text: Sequence[int], end: int, most: int, stop: int) -> list[int]:
    """Up to `most` tokens of the text from `end` on, before the first `stop`; past the text's end it is taken to go on
    as it did from there."""
    out: list[int] = []
    period = len(text) - end
    for i in range(most if period > 0 else 0):
        token = text[end + i % period]
        if token == stop:
            break
        out.append(token)
    return out
