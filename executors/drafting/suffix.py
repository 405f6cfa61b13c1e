"""Drafter `suffix`: what followed the longest stretch that the sequence, or an earlier answer to the same tenant, has
in common with its end.

After "SuffixDecoding" (Oliaro et al., 2024): unlike n-grams it looks at as much context as there is, and it learns from
past answers. Those are kept apart by cache namespace, so that no tenant's text is ever proposed to another; even then
it could show only in the time an answer takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakKeyDictionary

import msgspec

from octavo.executors.drafting.automaton import Automaton, after
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Drafter, DrafterOptions, Host, Want
from octavo.executors.drafting.trust import promised
from octavo.executors.residents import Resident

_SEPARATOR = -1
"""Between two answers in a memory; no token has it."""
_BACK = 64
"""Tokens of a sequence that are followed in a memory that is new to it."""


@dataclass(eq=False)
class _Reading:
    """Where a sequence is in one memory: the longest suffix of its tokens that is in there."""

    taken: int
    """Tokens of the sequence that were followed."""
    state: int = 0
    length: int = 0


class _Follow:
    """A sequence: its own text from token `start` on, and where it is in the memories of its tenant."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.own = Automaton()
        self.readings: WeakKeyDictionary[Automaton, _Reading] = WeakKeyDictionary()


class Suffix(Drafter):
    class Options(DrafterOptions, frozen=True):
        shortest: Annotated[int, msgspec.Meta(ge=1)] = 1
        """Tokens that must be in common with what is proposed to go on."""
        context: Annotated[int, msgspec.Meta(ge=16)] = 8192
        """Tokens of a sequence's own text that are looked at, up to twice as many before it is cut; a token takes about
        half a kilobyte."""
        memory: Annotated[int, msgspec.Meta(ge=0)] = 65536
        """Tokens of past answers that are kept in all; the tenant that was served least lately loses its first."""

    def __init__(self, host: Host, options: Options) -> None:
        self._options = options
        self._follows: WeakKeyDictionary[Resident, _Follow] = WeakKeyDictionary()
        self._memories: OrderedDict[bytes, list[Automaton]] = OrderedDict()
        """By namespace, least lately used first: the older half of its answers and the newer one."""

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [self._one(want.resident, want.most) for want in wants]

    def left(self, resident: Resident) -> None:
        """Keep what it answered."""
        answer = resident.tokens[resident.prompt_len :]
        half = self._options.memory // 2
        if len(answer) <= self._options.shortest or len(answer) >= half:
            return
        halves = self._memories.setdefault(resident.namespace, [Automaton()])
        self._memories.move_to_end(resident.namespace)
        if len(halves[-1].text) + len(answer) >= half:
            halves[:] = [halves[-1], Automaton()]
        halves[-1].extend([*answer, _SEPARATOR])
        while self.remembered > self._options.memory:
            oldest = next(iter(self._memories.values()))
            oldest.pop(0)
            if not oldest:
                self._memories.popitem(last=False)

    def forget(self) -> None:
        self._follows.clear()

    @property
    def remembered(self) -> int:
        """Tokens of past answers that are kept."""
        return sum(len(half.text) for halves in self._memories.values() for half in halves)

    def _one(self, resident: Resident, most: int) -> Draft:
        """From its own text or a past answer, whichever has more in common with its end; its own if they are equal."""
        tokens = resident.tokens
        follow = self._follow(resident)
        follow.own.extend(tokens[follow.start + len(follow.own.text) :])
        end, best = follow.own.repeated()
        text: Sequence[int] = follow.own.text
        for memory in self._memories.get(resident.namespace, ()):
            reading = follow.readings.setdefault(memory, _Reading(max(0, len(tokens) - _BACK)))
            for token in tokens[reading.taken :]:
                reading.state, reading.length = memory.step(reading.state, reading.length, token)
            reading.taken = len(tokens)
            if reading.length > best:
                end, best, text = memory.end(reading.state), reading.length, memory.text
        if best < self._options.shortest:
            return NO_DRAFT
        return Draft(after(text, end, promised(best, most), _SEPARATOR))

    def _follow(self, resident: Resident) -> _Follow:
        """Begun anew when its text has become too long."""
        context, follow = self._options.context, self._follows.get(resident)
        if follow is None or len(resident.tokens) - follow.start > 2 * context:
            follow = self._follows[resident] = _Follow(max(0, len(resident.tokens) - context))
        return follow
