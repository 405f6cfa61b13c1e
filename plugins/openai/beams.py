"""Beam search: which continuations of a prompt go on, which are complete, and when nothing can get better. Pure.

    tell(what each of `running` may be continued by) ─▶ `running`, `finished`, `done`

A beam's score is the sum of its tokens' log-probabilities; complete ones are compared by score / length^penalty, the
end token counted (the length normalisation of Wu et al. 2016, arXiv:1609.08144, section 7, without its constant).
The rules are those of transformers' `generate(num_beams=…)`, so the same model gives the same beams:

- Of all continuations of all beams, the `width` best that do not end go on. Those that end and are among the `width`
  best of all are complete; a complete one stays while it is among the `width` best complete ones.
- `early_stopping` True: done once `width` are complete. False: also once the best that runs, at its length now, is no
  better than the worst complete one. "never": the same, but at the greatest length it could reach, if the penalty is
  positive; so nothing that could win is given up.

Knows nothing of requests, text or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from octavo.core.messages import TextLogprob

EarlyStopping = bool | Literal["never"]


class BeamSearch(NamedTuple):
    """What is asked for: the best of `width` beams."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class Beam(NamedTuple):
    """Tokens of the output so far, with their log-probabilities."""

    ids: tuple[int, ...] = ()
    score: float = 0.0
    entries: tuple[TextLogprob, ...] = ()


class Option(NamedTuple):
    """One token that may come next."""

    id: int
    logprob: float
    entry: TextLogprob


class Beams:
    """The state of one search. A beam needs its `options_needed` likeliest options told, or all that there are."""

    def __init__(self, search: BeamSearch, ends: Sequence[int], limit: int) -> None:
        """`ends` are the ids that end an output, `limit` the most tokens that it may have (at least 1)."""
        self._search = search
        self._ends = frozenset(ends)
        self._limit = limit
        self._length = 0
        self.options_needed = search.width + len(self._ends)
        """As many of one beam could be among the `width` best of all that do not end."""
        self.running: list[Beam] = [Beam()]
        """Best first; all of the same length."""
        self.finished: list[tuple[float, Beam]] = []
        """With their normalised scores, best first."""
        self.done = False

    def tell(self, options: Sequence[Sequence[Option]]) -> None:
        """What may come after each running beam, in their order; each best first, as many as there are."""
        width = self._search.width
        self._length += 1
        found = [
            (beam.score + option.logprob, beam, option)
            for beam, likely in zip(self.running, options, strict=True)
            for option in likely[: self.options_needed]
        ]
        found.sort(key=lambda candidate: -candidate[0])  # stable: of equal ones the better beam's comes first
        last = self._length == self._limit
        complete = [one for one in found[:width] if last or one[2].id in self._ends]
        going = [] if last else [one for one in found if one[2].id not in self._ends]
        self.finished += [(self._normalised(score, self._length), _extended(beam, o)) for score, beam, o in complete]
        self.finished.sort(key=lambda one: -one[0])
        del self.finished[width:]
        self.running = [_extended(beam, option) for _, beam, option in going[:width]]
        self.done = not self.running or self._nothing_better()

    def ends_with(self, beam: Beam) -> bool:
        """Whether a finished beam came to an end of its own; else it was cut."""
        return beam.ids[-1] in self._ends

    def _nothing_better(self) -> bool:
        if len(self.finished) < self._search.width:
            return False
        if self._search.early_stopping is True:
            return True
        hopeful = self._search.early_stopping == "never" and self._search.length_penalty > 0
        reach = self._limit if hopeful else self._length
        return self._normalised(self.running[0].score, reach) <= self.finished[-1][0]

    def _normalised(self, score: float, length: int) -> float:
        value: float = score / length**self._search.length_penalty
        return value


def _extended(beam: Beam, option: Option) -> Beam:
    return Beam((*beam.ids, option.id), beam.score + option.logprob, (*beam.entries, option.entry))
