"""The grammars of an executor's residents: where each answer is in its own.

A matcher is made from a resident's tokens when it is first asked for, and follows them: so it needs nothing to be
carried over a preemption, a fork or a restart.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from octavo.core.grammar import Grammars, Mask, Matcher
from octavo.executors.residents import Resident


class Matchers:
    """`grammars` is None where no grammar is served: then nobody may ask for one."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._followed: WeakKeyDictionary[Resident, tuple[Matcher, int]] = WeakKeyDictionary()
        """The matcher, and how many of the resident's tokens it has taken."""

    def mask(self, resident: Resident) -> Mask | None:
        """What may come next for it; None if it has no grammar. Raises `GrammarError`."""
        grammar = resident.sampling.grammar
        if grammar is None or self._grammars is None:
            return None
        matcher, taken = self._followed.get(resident) or (self._grammars.start(grammar), resident.prompt_len)
        matcher.take(resident.tokens[taken:])
        self._followed[resident] = (matcher, len(resident.tokens))
        return matcher.mask()
