"""The rule `rejection` keeps the distribution, whatever guesses and however sure: against exact numbers, and faults in
the rule are seen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pytest

from octavo.core.messages import Sampling
from octavo.executors.drafting.contract import Draft
from octavo.executors.drafting.rolling import guess
from octavo.executors.drafting.verification import remaining, verify, walk
from octavo.executors.sampling import Context, Ids, Logits, Reals, distribution

DRAWS = 100_000
Remaining: TypeAlias = Callable[[Ids, Reals, int, Reals | None, float], Reals | None]

P = np.array([0.31, 0.05, 0.2, 0.0, 0.14, 0.3])
QS = {
    "alike": np.array([0.3, 0.06, 0.2, 0.02, 0.12, 0.3]),
    "flat": np.full(6, 1 / 6),
    "sure of what is likely": np.array([1.0, 0, 0, 0, 0, 0]),
    "sure of what is unlikely": np.array([0, 1.0, 0, 0, 0, 0]),
    "sure of what cannot be": np.array([0, 0, 0, 1.0, 0, 0]),
    "blind to half": np.array([0.5, 0.5, 0, 0, 0, 0]),
}
LIMIT = 25.7
"""What chi-square with 5 degrees of freedom passes once in 10 000 times: a level of 0.001 over the tests here."""


LOTS = 1024
"""Values that the lot of an acceptance takes here: a rule is asked once for each, and each guess."""


def drawn(rule: Remaining, q: Reals, certain: bool, seed: int) -> Reals:
    """Counts of `DRAWS` tokens by the rule: guesses from q, and then what it says."""
    draw = np.random.default_rng(seed)
    guesses, lots = draw.choice(6, size=DRAWS, p=q), draw.integers(0, LOTS, DRAWS)
    ids, counts = np.arange(6), np.zeros(6)
    for x in np.unique(guesses).tolist():
        answers = [rule(ids, P, x, None if certain else q, (i + 0.5) / LOTS) for i in range(LOTS)]
        taken = np.array([rest is None for rest in answers])[lots[guesses == x]]
        counts[x] += taken.sum()
        rest = next((rest for rest in answers if rest is not None), None)
        if rest is not None:
            counts += draw.multinomial(len(taken) - taken.sum(), rest / rest.sum())
    return counts


def chi_square(counts: Reals, p: Reals) -> float:
    possible = p > 0
    if counts[~possible].any():
        return float("inf")
    expected = counts.sum() * p[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("name", QS)
def test_tokens_have_the_targets_distribution(name: str) -> None:
    q = QS[name]
    certain = bool(q.max() == 1.0)
    assert chi_square(drawn(remaining, q, certain, 1), P) < LIMIT


def always(ids: Ids, p: Reals, x: int, q: Reals | None, u: float) -> Reals | None:
    return None


def likely(ids: Ids, p: Reals, x: int, q: Reals | None, u: float) -> Reals | None:
    """Accepts by p alone."""
    assert q is not None
    return None if u < p[x] else np.maximum(p - q, 0)


def unchanged(ids: Ids, p: Reals, x: int, q: Reals | None, u: float) -> Reals | None:
    """Draws again from p instead of from what is left of it."""
    assert q is not None
    return None if u * q[x] < p[x] else p


def other(ids: Ids, p: Reals, x: int, q: Reals | None, u: float) -> Reals | None:
    """Only forbids the guess."""
    assert q is not None
    return None if u * q[x] < p[x] else np.where(ids == x, 0.0, p)


def inverted(ids: Ids, p: Reals, x: int, q: Reals | None, u: float) -> Reals | None:
    assert q is not None
    return None if u * p[x] < q[x] else np.maximum(p - q, 0)


@pytest.mark.parametrize("mutant", [always, likely, unchanged, other, inverted])
def test_broken_rules_are_seen(mutant: Remaining) -> None:
    assert chi_square(drawn(mutant, QS["flat"], False, 2), P) > LIMIT


# ── the whole of it ──────────────────────────────────────────────────────────────────────────────

ROWS: Logits = np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32)
DRAFT_ROWS: Logits = np.random.default_rng(4).normal(size=(3, 5)).astype(np.float32)


def exact(sampling: Sampling) -> Reals:
    """Joint distribution [5, 5] of the first two tokens: row 0, then row 1, each after what came before."""
    joint = np.zeros((5, 5))
    first_ids, first = distribution(ROWS[0], Context(sampling, 0, 1, [1]))
    for a, p in zip(first_ids.tolist(), (np.exp(first) / np.exp(first).sum()).tolist(), strict=True):
        ids, scores = distribution(ROWS[1], Context(sampling, 0, 1, [1, a]))
        joint[a, ids] = p * np.exp(scores) / np.exp(scores).sum()
    return joint


@pytest.mark.parametrize("sampled", [True, False])
def test_pairs_of_tokens_have_the_targets_distribution_with_all_options(
    sampled: bool, pytestconfig: pytest.Config
) -> None:
    """Through `verify` with Philox noise, a seed a draw: a draft that is drawn or certain, penalties and top-p at each
    place.

    After a rejection the second token is drawn in another step; here it is drawn at once from the same row."""
    options = {"temperature": 1.3, "top_p": 0.97, "repetition": 1.3, "presence": 0.2}
    counts = np.zeros((5, 5))
    for seed in range(DRAWS if pytestconfig.getoption("--speculation-all") else 800):
        sampling = Sampling(seed=seed, **options)  # type: ignore[arg-type]
        ids, chances = [1], []
        for row in DRAFT_ROWS[:2]:
            token, chance = guess(row, Context(sampling, 0, 1, ids), "rejection" if sampled else "coupled")
            ids.append(token)
            chances.append(chance)
        draft = Draft(ids[1:], np.stack([c for c in chances if c is not None]) if sampled else None)
        if not sampled:
            draft = Draft([2, 4])
        new = verify(ROWS[:3], draft, Context(sampling, 0, 1, [1]), "rejection")
        if len(new) == 1:
            new += verify(ROWS[1:2], Draft(), Context(sampling, 0, 1, [1, *new]), "rejection")
        counts[new[0], new[1]] += 1
    assert chi_square(counts.ravel(), exact(Sampling(**options)).ravel()) < 60  # type: ignore[arg-type] # 24 degrees


def test_greedy_takes_what_is_best() -> None:
    best = [int(row.argmax()) for row in ROWS]
    context = Context(Sampling(temperature=0.0), 0, 1, [1])
    for rule in ("coupled", "rejection"):
        assert verify(ROWS, Draft(best[:3]), context, rule) == best
        wrong = [best[0], (best[1] + 1) % 5, best[2]]
        assert verify(ROWS, Draft(wrong), context, rule) == best[:2]


def drawn_before(rows: list[int]) -> Callable[[int, list[int]], int]:
    return lambda row, _: rows[row]


def test_all_rows_at_once_give_what_one_after_another_does() -> None:
    """`walk`, for executors that draw every row with the guesses before it for context."""
    for seed in range(40):
        sampling = Sampling(seed=seed, repetition=1.5)
        guesses = np.random.default_rng(seed).integers(0, 5, 3).tolist()
        rows = [verify(row[None], Draft(), Context(sampling, 0, 1, [1, *guesses[:i]]))[0] for i, row in enumerate(ROWS)]
        assert walk(4, Draft(guesses), drawn_before(rows)) == verify(ROWS, Draft(guesses), Context(sampling, 0, 1, [1]))


def test_noise_is_another_at_each_place_and_for_each_purpose() -> None:
    """Else a drafter's choice would tell what the verification is about to draw."""
    row = np.zeros(1000, dtype=np.float32)
    context = Context(Sampling(seed=7), 0, 1, [1])
    coupled, _ = guess(row, context, "coupled")
    assert verify(row[None], Draft(), context) == [coupled]
    drafted = [guess(row, context._replace(ids=[1] * n), "rejection")[0] for n in range(1, 8)]
    assert all(a != b for a, b in pairwise(drafted))
    assert drafted[0] != coupled
