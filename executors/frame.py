"""A step's pass and what comes of it: the frame that executors over torch share. Knows no weights and no KV bytes; what
they compute with is a `Passes`.

    begin: runs, drafts ──▶ spans ──▶ one pass          end: rows that are finite ──▶ what they say, what stays

Between the two a device may still be at it, and the next step may begin: see `cuda.executor`. A run whose own numbers
are not finite fails alone. If it had guesses they may be why, so it is computed again without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from octavo.core.messages import TokenLogprob
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Took
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.tree import kept
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Run, Span, of_prompt, span_of

if TYPE_CHECKING:
    from torch import Tensor

M = TypeVar("M")
"""What a pass leaves behind."""


class Asked(NamedTuple):
    """A run that samples, with its guesses. Rows of the pass from `row` on are of its last token and of each guess."""

    run: Run
    draft: Draft
    row: int

    @property
    def rows(self) -> range:
        return range(self.row, self.row + len(self.draft.tokens) + 1)


class Passes(Protocol[M]):
    def begin(self, spans: list[Span], asked: list[Asked]) -> M:
        """Write the KV of the spans' tokens and compute what comes of them: a row each, in their order."""
        ...

    def finite(self, made: M) -> Sequence[bool]:
        """By row, whether its last hidden state is."""
        ...

    def say(self, made: M, heard: list[Asked]) -> list[Outcome]:
        """What comes of each of those who asked and have finite rows of their own."""
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
    """`outcomes` are final for runs that could not be computed, which are none of `starts`: first rows by run."""

    runs: list[Run]
    drafts: list[Draft]
    outcomes: list[Outcome]
    starts: dict[int, int]
    asked: dict[int, Asked]
    made: M | None

    @property
    def guessed(self) -> bool:
        return any(draft.tokens for draft in self.drafts)


class Frame(Generic[M]):
    def __init__(self, passes: Passes[M], settlement: Settlement, drafting: Drafting) -> None:
        self._passes, self._settlement, self._drafting = passes, settlement, drafting

    def begin(self, runs: list[Run], drafts: list[Draft]) -> Begun[M]:
        outcomes = self._settlement.refused(runs)
        starts: dict[int, int] = {}
        asked: dict[int, Asked] = {}
        spans: list[Span] = []
        at = 0
        for i, (run, draft, outcome) in enumerate(zip(runs, drafts, outcomes, strict=True)):
            if outcome.failure is not None:
                continue
            spans.append(span_of(run, draft.tokens, draft.parents))
            starts[i] = at
            if run.samples:
                asked[i] = Asked(run, draft, at + run.end - run.start - 1)
            at += len(spans[-1].ids)
        made = self._passes.begin(spans, list(asked.values())) if spans else None
        return Begun(runs, drafts, outcomes, starts, asked, made)

    def end(self, begun: Begun[M], took: list[Took]) -> list[Outcome]:
        """Outcomes in the order of the runs, and in `took` what was computed, if the drafter wants to know."""
        outcomes, runs, drafts, made = begun.outcomes, begun.runs, begun.drafts, begun.made
        if made is None:
            return outcomes
        finite = self._passes.finite(made)
        poisoned: list[int] = []
        for i, start in () if all(finite) and not self._settlement.failures else begun.starts.items():
            run = runs[i]
            known = finite[start : start + run.end - run.start]
            if (why := self._settlement.failure(run)) is not None:  # of a step that ended after this one had begun
                outcomes[i] = Outcome(why)
            elif not all(known):
                outcomes[i] = Outcome(not_finite(run.start + list(known).index(False)))
                if drafts[i].tokens:
                    poisoned.append(i)
        heard = [i for i in begun.asked if outcomes[i].failure is None]
        said = self._passes.say(made, [begun.asked[i] for i in heard]) if heard else []
        for i, outcome in zip(heard, said, strict=True):
            outcomes[i] = outcome
        done = [i for i in begun.starts if outcomes[i].failure is None]
        for i in done:
            if runs[i].resident.sampling.prompt_logprobs >= 0 and (about := of_prompt(runs[i])):
                entries = self._passes.prompt(made, runs[i], range(begun.starts[i], begun.starts[i] + len(about)))
                outcomes[i] = outcomes[i]._replace(prompt=entries)
        branched = [i for i in done if drafts[i].parents is not None]
        if branched:
            self._passes.straighten([(runs[i], kept(runs[i], drafts[i], outcomes[i].tokens)) for i in branched])
        for i in done if self._drafting.features else ():
            rows = [begun.starts[i] + row for row in kept(runs[i], drafts[i], outcomes[i].tokens)]
            took.append(Took(runs[i].resident, runs[i].start, *self._passes.states(made, rows)))
        if poisoned:
            alone = self.begin([runs[i] for i in poisoned], [NO_DRAFT] * len(poisoned))
            for i, outcome in zip(poisoned, self.end(alone, took), strict=True):
                outcomes[i] = outcome
        return outcomes


def not_finite(position: int) -> str:
    return f"the model's numbers at position {position} are not finite"
