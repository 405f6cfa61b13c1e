"""Drafting as an executor uses it: makes the configured drafter, asks it in each step, and keeps its answers within
bounds. Without a drafter everything here is empty.

    drafts = drafting.drafts(bind, runs)       one Draft a run, before the pass
    …      = verify(rows, draft, context, drafting.rule, mask)
    drafting.took(…)                           after the settlement, if drafting.features
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.messages import StepBind
from octavo.core.plugins import PluginError, resolve
from octavo.executors.drafting.contract import GROUP, NO_DRAFT, Draft, Drafter, Host, Took, Want
from octavo.executors.drafting.verification import Rule
from octavo.executors.residents import Resident, Residents, Run


class Drafting:
    def __init__(self, drafter: Drafter | None, vocab_size: int, rule: Rule = "coupled") -> None:
        self.rule: Rule = rule
        self.features = drafter is not None and drafter.features
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._known: set[Resident] = set()

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
        return cls(kind(host, options), vocab_size, speculation.verification)

    def drafts(self, bind: StepBind, runs: Sequence[Run], residents: Residents) -> list[Draft]:
        """One for each run; empty for those that have no room for guesses."""
        if self._drafter is None:
            return [NO_DRAFT] * len(runs)
        self._tell_who_left(residents)
        self._drafter.bound(bind)
        asked = [i for i, run in enumerate(runs) if run.drafts > 0]
        out = [NO_DRAFT] * len(runs)
        if asked:
            wants = [Want(runs[i].resident, runs[i].drafts) for i in asked]
            for i, want, draft in zip(asked, wants, self._drafter.draft(wants), strict=True):
                out[i] = self._bounded(draft, want.most)
        return out

    def took(self, took: Sequence[Took]) -> None:
        if self._drafter is not None and took:
            self._drafter.took(took)

    def forget(self) -> None:
        self._known.clear()
        if self._drafter is not None:
            self._drafter.forget()

    def _bounded(self, draft: Draft, most: int) -> Draft:
        """No more than there is room for, and nothing that the target has no token for."""
        tokens = [int(token) for token in draft.tokens[:most]]
        wrong = (i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size)
        return Draft(tokens[: next(wrong, len(tokens))], draft.chances)

    def _tell_who_left(self, residents: Residents) -> None:
        assert self._drafter is not None
        now = set(residents.slots.values())
        for resident in self._known - now:
            self._drafter.left(resident)
        self._known = now
