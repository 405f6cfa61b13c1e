"""Stop strings over a stream of pieces: which pieces can be let go, and where an answer ends.

    text so far   ……………………………………………a c│e f g          stop "efgh": "efg" may become it
                  released         │ held              pieces are released whole, so the border is a piece's

Matching is Knuth-Morris-Pratt, a state per stop string: the state is the number of characters at the end that may
become that string, so it says both what to hold and when it has matched; each character costs a constant. Of
several stop strings the one that is complete first ends the answer (the longest, if that is at the same
character): so the end does not depend on how the text was cut into pieces.

Pure. Knows nothing of tokenizers.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from octavo.core.tokenizer.detokenize import Piece


class StopStrings:
    """A request's stop strings, prepared once for all of its choices."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.patterns = [(string, _borders(string)) for string in strings]


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders


class Released(NamedTuple):
    """Ids with exactly their text. When `stopped`, text ends before the stop string and ids with the token that
    completed it, and nothing more comes."""

    ids: list[int]
    text: str
    stopped: bool = False


class StopFilter:
    """The filter of one choice. Starts fresh on a resume: what had been delivered was in no possible stop."""

    def __init__(self, stops: StopStrings) -> None:
        self._patterns = stops.patterns
        self._states = [0] * len(stops.patterns)
        self._held: deque[Piece] = deque()
        self._held_chars = 0

    def push(self, piece: Piece) -> Released:
        """What can be released now that `piece` is known; possibly nothing."""
        if not self._patterns:
            return Released(piece.ids, piece.text)
        self._held.append(piece)
        for at, char in enumerate(piece.text):
            if length := self._advance(char):
                return self._stop(self._held_chars + at + 1 - length)
        self._held_chars += len(piece.text)
        return self._release(keep=max(self._states, default=0))

    def flush(self) -> Released:
        """All that is held: the answer has ended in another way."""
        return self._release(keep=0)

    def _advance(self, char: str) -> int:
        """Take one character; the length of the longest stop string that it completes, or 0."""
        complete = 0
        for i, (pattern, borders) in enumerate(self._patterns):
            state = self._states[i]
            while state and pattern[state] != char:
                state = borders[state - 1]
            if pattern[state] == char:
                state += 1
            if state == len(pattern):
                complete = max(complete, state)
                state = 0  # nobody looks at it again
            self._states[i] = state
        return complete

    def _stop(self, end: int) -> Released:
        """Everything held is released, but for the text from `end` on."""
        released = _joined(self._held)
        self._held.clear()
        return Released(released.ids, released.text[:end], stopped=True)

    def _release(self, keep: int) -> Released:
        """The longest run of whole pieces that leaves at least `keep` characters."""
        free: list[Piece] = []
        while self._held and self._held_chars - len(self._held[0].text) >= keep:
            piece = self._held.popleft()
            self._held_chars -= len(piece.text)
            free.append(piece)
        return _joined(free)


def _joined(pieces: list[Piece] | deque[Piece]) -> Released:
    return Released([token for piece in pieces for token in piece.ids], "".join(piece.text for piece in pieces))
