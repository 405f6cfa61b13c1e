"""Guesses of a model that says one token after another: all sequences together, a pass a guess."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.executors.drafting.contract import Draft, Stack, Want
from octavo.executors.drafting.verification import Rule
from octavo.executors.philox import Purpose
from octavo.executors.residents import Span
from octavo.executors.sampling import Context, Logits, Reals, distribution, draw, sample


def roll(
    stack: Stack, wants: Sequence[Want], starts: Sequence[int], vocab_size: int, rule: Rule, layers: int | None = None
) -> list[Draft]:
    """Compute each resident's tokens from `starts` on (at least the last one), then guess after guess; the KV of all
    but the last guess is written. `vocab_size` is the target's: what the model says of ids beyond it is not looked
    at."""
    spans = [
        Span(want.resident.tokens[start:], start, want.resident.table)
        for want, start in zip(wants, starts, strict=True)
    ]
    guesses: list[list[int]] = [[] for _ in wants]
    chances: list[list[Reals]] = [[] for _ in wants]
    live = list(range(len(wants)))
    while live:
        rows = stack.after(spans, layers)[:, :vocab_size]
        going: list[int] = []
        spans = []
        for i, row in zip(live, rows, strict=True):
            resident, most = wants[i]
            if not np.isfinite(row).all():
                continue
            ids = [*resident.tokens, *guesses[i]]
            token, chance = guess(row, Context(resident.sampling, resident.choice, resident.prompt_len, ids), rule)
            guesses[i].append(token)
            if chance is not None:
                chances[i].append(chance)
            if len(guesses[i]) < most:
                going.append(i)
                spans.append(Span([token], len(ids), resident.table))
        live = going
    return [
        Draft(tokens, np.stack(rows) if rows and len(rows) == len(tokens) else None)
        for tokens, rows in zip(guesses, chances, strict=True)
    ]


def guess(row: Logits, context: Context, rule: Rule) -> tuple[int, Reals | None]:
    """The drafter's own choice, and the distribution [vocab] that it was drawn from, where the rule asks for it.

    Coupled, it is made with the target's noise: where the two distributions are alike, so are the tokens."""
    if rule == "coupled" or context.sampling.temperature == 0:
        return sample(row, context), None
    ids, scores = distribution(row, context)
    weights = np.exp(scores)
    chances: Reals = np.zeros(len(row))
    chances[ids] = weights / weights.sum()
    return draw(ids, scores, context, Purpose.DRAFT), chances
