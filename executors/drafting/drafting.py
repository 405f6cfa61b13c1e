"""Drafting as an executor uses it: makes the configured drafter, asks it in each step, and keeps its answers within
bounds. Without a drafter everything here is empty.

    drafts = drafting.drafts(bind, runs)       one Draft a run, before the pass
    …      = verify(rows, draft, context, drafting.rule, mask)
    drafting.took(…)                           after the settlement, if drafting.features
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from octavo.core.config.schema import AUTO, Config
from octavo.core.messages import StepBind
from octavo.core.plugins import PluginError, resolve
from octavo.core.trace.log import log
from octavo.executors.drafting.contract import GROUP, NO_DRAFT, Draft, Drafter, Host, Took, Want
from octavo.executors.drafting.tree import check
from octavo.executors.drafting.verification import Rule
from octavo.executors.residents import Resident, Residents, Runs

MOST_FAILURES = 3
T = TypeVar("T")


def settled(config: Config, usual: str | None = None) -> Config:
    """With a drafter or none: `usual` is the executor's own where the configuration leaves it open."""
    if config.speculation.drafter != AUTO:
        return config
    drafter = None if config.policies.speculation == "off" else usual
    return replace(config, speculation=replace(config.speculation, drafter=drafter))


class Drafting:
    def __init__(
        self, drafter: Drafter | None, vocab_size: int, rule: Rule = "coupled", *, trees: bool = False
    ) -> None:
        self.rule: Rule = rule
        self.features = drafter is not None and drafter.features
        self.taps: Sequence[int] = () if drafter is None else drafter.taps
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._trees = trees
        self._known: set[Resident] = set()
        self.failures = 0
        """Exceptions of the drafter; after `MOST_FAILURES` it is not asked any more."""

    @classmethod
    def of(cls, host: Host) -> Drafting:
        """As the configuration says. Raises `PluginError` for options that the drafter does not take, and whatever the
        drafter raises."""
        speculation, vocab_size = host.config.speculation, host.facts.vocab_size
        if speculation.drafter is None:
            return cls(None, vocab_size)
        kind: type[Drafter] = resolve(GROUP, speculation.drafter)
        try:
            options = msgspec.convert(speculation.options, kind.Options)
        except msgspec.ValidationError as error:
            raise PluginError(f"speculation.options of the drafter {speculation.drafter!r}: {error}") from error
        return cls(kind(host, options), vocab_size, speculation.verification, trees=host.trees)

    def drafts(self, bind: StepBind, runs: Runs, residents: Residents) -> list[Draft]:
        """One for each run; empty for those that have no room for guesses."""
        if self._drafter is None:
            return [NO_DRAFT] * len(runs)
        self._tell_who_left(residents)
        self._ask(lambda drafter: drafter.bound(bind), None)
        asked = np.flatnonzero(runs.drafts > 0).tolist()
        out = [NO_DRAFT] * len(runs)
        if asked:
            wants = [Want(runs.residents[i], int(runs.drafts[i])) for i in asked]
            nothing = [NO_DRAFT] * len(wants)
            drafts = self._ask(lambda drafter: self._guesses(drafter, wants), nothing)
            for i, draft in zip(asked, drafts, strict=True):
                out[i] = draft
        return out

    @property
    def guesses(self) -> bool:
        """Whether anybody does."""
        return self._drafter is not None

    @property
    def stats(self) -> dict[str, int]:
        return {"drafter_failures": self.failures}

    def took(self, took: Sequence[Took]) -> None:
        if took:
            self._ask(lambda drafter: drafter.took(took), None)

    def forget(self) -> None:
        self._known.clear()
        self._ask(lambda drafter: drafter.forget(), None)

    def _ask(self, what: Callable[[Drafter], T], otherwise: T) -> T:
        """What the drafter says; `otherwise` if it raises, whatever it raises: it may be a stranger's code, and
        nothing depends on it but speed."""
        if self._drafter is None:
            return otherwise
        try:
            return what(self._drafter)
        except Exception as error:  # noqa: BLE001 - as said above
            self.failures += 1
            name, left = type(self._drafter).__name__, MOST_FAILURES - self.failures
            then = f"it is asked on, after {left} more no longer" if left else "it is not asked any more"
            log().error(f"the drafter {name} failed, answers go on without its guesses; {then}", exc_info=error)
            if not left:
                self._drafter, self.features, self.taps = None, False, ()
                self._known.clear()
            return otherwise

    def _guesses(self, drafter: Drafter, wants: Sequence[Want]) -> list[Draft]:
        drafts = drafter.draft(wants)
        return [self._bounded(draft, want.most) for want, draft in zip(wants, drafts, strict=True)]

    def _bounded(self, draft: Draft, most: int) -> Draft:
        """No more than there is room for, and nothing that the target has no token for. Raises `ValueError`."""
        tokens = [int(token) for token in draft.tokens[:most]]
        wrong = (i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size)
        tokens = tokens[: next(wrong, len(tokens))]
        check(draft)
        if draft.chances is not None and draft.chances.shape != (len(draft.tokens), self._vocab_size):
            raise ValueError(
                f"the distributions of a draft are {draft.chances.shape}; {len(draft.tokens)} of {self._vocab_size} "
                "tokens were expected"
            )
        parents = None if draft.parents is None else [int(parent) for parent in draft.parents[: len(tokens)]]
        if parents == list(range(-1, len(tokens) - 1)):
            parents = None
        if parents is not None and not self._trees:
            raise ValueError("a draft is a tree, this executor verifies chains")
        chances = None if draft.chances is None else np.asarray(draft.chances[: len(tokens)], dtype=np.float64)
        return Draft(tokens, chances, parents)

    def _tell_who_left(self, residents: Residents) -> None:
        now = set(residents.slots.values())
        gone, self._known = self._known - now, now
        if gone:
            self._ask(lambda drafter: _say_who_left(drafter, gone), None)


def _say_who_left(drafter: Drafter, gone: set[Resident]) -> None:
    for resident in gone:
        drafter.left(resident)
