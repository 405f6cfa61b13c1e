"""Of how many rounds a plan of decodes alone is: steps of the model in a row, told in one outcome.

What a step costs all processes but the executor is paid once a plan, and its tokens come together: so many rounds as
keep tokens coming often enough, by what a round took lately. Knows nothing of slots, blocks or clocks.
"""

from __future__ import annotations

MOST_ROUNDS = 8
"""However quick they are: what ends in the middle of a plan is told at its end."""
_LEARNT = 1 / 4
"""How much of a surprise is learnt from each plan."""


class Rounds:
    """`tell_every_ns` is about how far apart a sequence's tokens may be told; with 0 every plan is of one round."""

    def __init__(self, tell_every_ns: int) -> None:
        self._tell_every_ns = tell_every_ns
        self._round_ns = 0.0
        """What a round took lately; 0 while none was seen."""
        self._decodes = 0
        """Sequences that decoded in it."""

    def fit(self, decodes: int) -> int:
        """Rounds of so many sequences, at least 1. More of them than were seen are taken to need as much more time."""
        if not self._tell_every_ns or not self._round_ns:
            return 1
        expected = self._round_ns * max(1.0, decodes / self._decodes)
        return min(max(1, round(self._tell_every_ns / expected)), MOST_ROUNDS)

    def took(self, decodes: int, rounds: int, ns: int) -> None:
        """A plan of so many decodes, without guesses and chunks, has been computed."""
        each = max(1.0, ns / rounds)
        if decodes == self._decodes:
            self._round_ns += (each - self._round_ns) * _LEARNT
        else:
            self._decodes, self._round_ns = decodes, each
