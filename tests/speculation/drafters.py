"""Drafters for tests: one that knows the answers, one that knows nothing."""

from __future__ import annotations

import random
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


class Bush(Drafter):
    """Trees of any shape: each guess after any one before it. What comes next (`answers`, by prompt and choice) is
    somewhere among them for as long as luck has it, the rest is wrong."""

    class Options(DrafterOptions, frozen=True):
        answers: dict[tuple[tuple[int, ...], int], list[int]]

    def __init__(self, host: Host, options: Any) -> None:
        self._options = options

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [self._one(want) for want in wants]

    def _one(self, want: Want) -> Draft:
        resident = want.resident
        answer = self._options.answers[tuple(resident.tokens[: resident.prompt_len]), resident.choice]
        rest = answer[len(resident.tokens) - resident.prompt_len :]
        luck = random.Random(len(resident.tokens) * 31 + resident.choice)
        tokens: list[int] = []
        parents: list[int] = []
        right, depth = -1, 0  # the deepest guess that is right
        for i in range(want.most):
            parent = luck.choice((right, luck.randrange(-1, i)))
            said = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
            if parent == right and depth < len(rest) and rest[depth] not in said and luck.random() < 0.6:
                tokens.append(rest[depth])
                right, depth = i, depth + 1
            else:
                wrong = rest[depth] if parent == right and depth < len(rest) else -1
                tokens.append(luck.choice([token for token in range(97) if token != wrong and token not in said]))
            parents.append(parent)
        return Draft(tokens, None, parents)


class Silly(Drafter):
    """Any tokens, some of them none of the model's."""

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [Draft([hash((len(resident.tokens), i)) % 98 for i in range(most)]) for resident, most in wants]
