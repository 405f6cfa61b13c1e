"""A step's pass and what comes of it: the frame that executors over torch share. Knows no weights and no KV bytes; what
they compute with is a `Passes`.

    begin: runs, drafts ──▶ one pass          end: rows that are finite ──▶ what they say, what stays

Between the two a device may still be at it, and the next step may begin: see `cuda.executor`. A run whose own numbers
are not finite fails alone. If it had guesses they may be why, so it is computed again without.

There may be hundreds of runs in every step, most of which say one token: so what is told of all of them are columns,
and only who wants more is looked at alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from octavo.core.messages import TokenLogprob
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Took
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.tree import kept
from octavo.executors.outcome import Outcome, Outcomes, Settlement
from octavo.executors.residents import Run, Runs, of_prompt

if TYPE_CHECKING:
    from torch import Tensor

M = TypeVar("M")
"""What a pass leaves behind."""
T = TypeVar("T")


class Asked(NamedTuple):
    """Those of a pass who sample, a column each: the rows of the pass from `rows[j]` on are of the last token of
    `runs[j]` and of each guess of `drafts[j]`."""

    runs: Runs
    drafts: list[Draft]
    rows: Sequence[int]
    guessed: bool
    """Whether there is a guess at all."""

    def rows_of(self, j: int) -> range:
        return range(self.rows[j], self.rows[j] + len(self.drafts[j].tokens) + 1)

    @property
    def all_rows(self) -> Sequence[int]:
        return [row for j in range(len(self.runs)) for row in self.rows_of(j)] if self.guessed else self.rows


class Passes(Protocol[M]):
    def begin(self, runs: Runs, drafts: list[Draft], asked: Asked) -> M:
        """Write the KV of the runs' tokens and of the guesses after them, and compute what comes of them: a row each,
        in their order."""
        ...

    def finite(self, made: M) -> Sequence[int]:
        """By row, whether its last hidden state is."""
        ...

    def say(self, made: M, asked: Asked, heard: Sequence[int]) -> Outcomes:
        """What comes of those of `asked` that are `heard`, which have finite rows of their own; of others anything."""
        ...

    def prompt(self, made: M, run: Run, rows: range) -> list[TokenLogprob]:
        """What these rows say of the tokens after them: the prompt's from the run's second on."""
        ...

    def straighten(self, branched: list[tuple[Run, list[int]]]) -> None:
        """Bring the KV of the tokens that stay (of each run's rows these) to the cells of their positions: a tree gives
        cells out in its own order."""
        ...

    def states(self, made: M, rows: list[int]) -> tuple[Tensor, Tensor | None]:
        """Last hidden states, and the inputs of the layers that the drafter taps, as `Took` has them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Begun(Generic[M]):
    """`refused` are the outcomes of runs that could not be computed, by index. `computed` are the others' indices, and
    `starts` their first rows; `asking` those that sample, who are `asked`; `prompts` those whose prompts' tokens are
    asked for."""

    runs: Runs
    drafts: list[Draft]
    refused: dict[int, Outcome]
    computed: Sequence[int]
    starts: Sequence[int]
    asking: Sequence[int]
    asked: Asked
    prompts: list[int]
    made: M | None

    def placed(self, said: Outcomes, heard: Sequence[int], sick: dict[int, Outcome]) -> Outcomes:
        """By run, of what those who are `heard` of the asked said."""
        tokens, others = [0] * len(self.runs), self.refused | dict.fromkeys(self.computed, Outcome())
        for j in heard:
            i = self.asking[j]
            if j in said.others:
                others[i] = said.others[j]
            else:
                tokens[i] = said.tokens[j]
                del others[i]
        return Outcomes(tokens, others | sick)


class Frame(Generic[M]):
    def __init__(self, passes: Passes[M], settlement: Settlement, drafting: Drafting) -> None:
        self._passes, self._settlement, self._drafting = passes, settlement, drafting

    def begin(self, runs: Runs, drafts: list[Draft]) -> Begun[M]:
        everyone: Sequence[int] = range(len(runs))
        if refused := self._settlement.refused(runs):
            everyone = [i for i in everyone if i not in refused]
        sound, guesses = runs.picked(everyone), _picked(drafts, everyone)
        guessed = self._drafting.guesses and any(draft.tokens for draft in guesses)
        asking: Sequence[int] = everyone
        starts: Sequence[int] = range(len(sound))
        last = starts
        prompts: list[int] = []
        if not (single := sound.single):
            prompts = [i for i in everyone if runs.residents[i].sampling.prompt_logprobs >= 0 and of_prompt(runs[i])]
        if guessed or not single:
            own = (sound.end - sound.start).tolist()
            lengths = [n + len(draft.tokens) for n, draft in zip(own, guesses, strict=True)] if guessed else own
            starts = [0, *accumulate(lengths)][:-1]
            last = [start + n - 1 for start, n in zip(starts, own, strict=True)]
        if not sound.samples.all():
            which = np.flatnonzero(sound.samples).tolist()
            asking, last = [everyone[k] for k in which], [last[k] for k in which]
        asked = Asked(runs.picked(asking), _picked(drafts, asking), last, guessed)
        made = self._passes.begin(sound, guesses, asked) if sound else None
        return Begun(runs, drafts, refused, everyone, starts, asking, asked, prompts, made)

    def end(self, begun: Begun[M], took: list[Took]) -> Outcomes:
        """Outcomes of the runs, and in `took` what was computed, if the drafter wants to know."""
        runs, drafts, made = begun.runs, begun.drafts, begun.made
        if made is None:
            return Outcomes([0] * len(runs), begun.refused)
        sick, poisoned = self._sick(begun, made)
        heard: Sequence[int] = range(len(begun.asking))
        if sick:
            heard = [j for j in heard if begun.asking[j] not in sick]
        said = self._passes.say(made, begun.asked, heard) if heard else Outcomes([], {})
        outcomes = said if len(heard) == len(runs) else begun.placed(said, heard, sick)
        wanted = begun.prompts or self._drafting.features
        starts = dict(zip(begun.computed, begun.starts, strict=True)) if wanted else {}
        for i in begun.prompts:
            if not outcomes.failed(i):
                rows = range(starts[i], starts[i] + len(of_prompt(runs[i])))
                entries = self._passes.prompt(made, runs[i], rows)
                outcomes.others[i] = outcomes.at(i)._replace(prompt=entries)
        if begun.asked.guessed:
            branched = [i for i in begun.computed if drafts[i].parents is not None and not outcomes.failed(i)]
            stay = [(runs[i], kept(runs[i], drafts[i], outcomes.at(i).tokens)) for i in branched]
            if stay:
                self._passes.straighten(stay)
        if self._drafting.features:
            done = [i for i in begun.computed if not outcomes.failed(i)]
            staying = [[starts[i] + row for row in kept(runs[i], drafts[i], outcomes.at(i).tokens)] for i in done]
            took += self._taken(made, [runs[i] for i in done], staying)
        if poisoned:
            alone = self.end(self.begin(runs.picked(poisoned), [NO_DRAFT] * len(poisoned)), took)
            for k, i in enumerate(poisoned):
                outcomes.others[i] = alone.at(k)
        return outcomes

    def _taken(self, made: M, runs: list[Run], rows: list[list[int]]) -> list[Took]:
        """Of these runs, of each of which some rows stay: brought together at once."""
        if not runs:
            return []
        firsts = [0, *accumulate(len(mine) for mine in rows)]
        hidden, inner = self._passes.states(made, list(chain.from_iterable(rows)))
        return [
            Took(run.resident, run.start, hidden[at:end], None if inner is None else inner[at:end])
            for run, at, end in zip(runs, firsts, firsts[1:], strict=False)
        ]

    def _sick(self, begun: Begun[M], made: M) -> tuple[dict[int, Outcome], list[int]]:
        """Outcomes of runs whose own numbers are not finite, or that failed meanwhile, and who of them had guesses."""
        finite = self._passes.finite(made)
        if all(finite) and not self._settlement.failures:
            return {}, []
        sick: dict[int, Outcome] = {}
        poisoned: list[int] = []
        for i, start in zip(begun.computed, begun.starts, strict=True):
            run = begun.runs[i]
            known = list(finite[start : start + run.end - run.start])
            if (why := self._settlement.failure(run)) is not None:  # of a step that ended after this one had begun
                sick[i] = Outcome(why)
            elif not all(known):
                sick[i] = Outcome(not_finite(run.start + known.index(False)))
                if begun.drafts[i].tokens:
                    poisoned.append(i)
        return sick, poisoned


def not_finite(position: int) -> str:
    return f"the model's numbers at position {position} are not finite"


def _picked(columns: list[T], which: Sequence[int]) -> list[T]:
    return columns if len(which) == len(columns) else [columns[i] for i in which]
