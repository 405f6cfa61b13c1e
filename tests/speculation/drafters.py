"""Drafters for tests: one that knows the answers, one that knows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.executors.drafting.contract import Draft, Drafter, DrafterOptions, Host, Want


class Oracle(Drafter):
    """Guesses `answers` (by prompt and choice) right, but for about one in `wrong_in` positions."""

    class Options(DrafterOptions, frozen=True):
        answers: dict[tuple[tuple[int, ...], int], list[int]]
        wrong_in: int = 5

    def __init__(self, host: Host, options: Any) -> None:
        self._options = options

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [Draft(self._guesses(want)) for want in wants]

    def _guesses(self, want: Want) -> list[int]:
        resident = want.resident
        answer = self._options.answers[tuple(resident.tokens[: resident.prompt_len]), resident.choice]
        at = len(resident.tokens) - resident.prompt_len
        return [
            token if (at + i) * 7919 % 101 % self._options.wrong_in else token + 1
            for i, token in enumerate(answer[at : at + want.most])
        ]


class Silly(Drafter):
    """Any tokens, some of them none of the model's."""

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [Draft([hash((len(resident.tokens), i)) % 98 for i in range(most)]) for resident, most in wants]
