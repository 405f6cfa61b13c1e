"""Trees of guesses: the same answers as without, whatever their shape, and faults in how they are taken are seen.

What goes for all drafters, chains or trees, is in `test_coupled`; `Bush` is one of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.messages import Sampling
from octavo.executors.cpu import executor as cpu_executor
from octavo.executors.cpu import passes
from octavo.executors.drafting import tree, verification
from octavo.executors.drafting.contract import Draft, Drafter, Want
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.verification import judge, verify
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.residents import Resident, Run, span_of
from octavo.executors.sampling import Context, Logits, Reals
from tests.executors.tiny import VOCAB
from tests.speculation.conftest import CpuMaker, NativeMaker
from tests.speculation.drafters import Bush
from tests.speculation.replica import Replica, asked
from tests.speculation.test_rejection import chi_square

PROMPT = [(i * 37 + 5) % VOCAB for i in range(9)]
REQUESTS = [asked(i, [*PROMPT, i], tokens=40, sampling=Sampling(temperature=0.5 * i, seed=i)) for i in range(3)]


def bushy(tiny: CpuMaker, answers: dict[tuple[int, int], list[int]]) -> Replica:
    told = {(tuple(r.ids.tolist()), 0): answers[r.handle, 0] for r in REQUESTS}
    return Replica(tiny(Bush, answers=told), options={"tokens": 7})


@pytest.fixture(scope="module")
def answers(tiny: CpuMaker) -> dict[tuple[int, int], list[int]]:
    return Replica(tiny(), policy="off").run(REQUESTS)


def test_a_tree_yields_more_than_one_guess_and_no_other_token(tiny: CpuMaker, answers: dict[Any, list[int]]) -> None:
    replica = bushy(tiny, answers)
    assert replica.run(REQUESTS) == answers
    assert any((result.n_new > 3).any() for result in replica.results)
    assert replica.accepted > len(replica.results)


def first_child(draft: Draft, node: int, token: int) -> int | None:
    """Descends whatever was said."""
    return next(iter(tree.children(draft, node)), None)


def any_guess(draft: Draft, node: int, token: int) -> int | None:
    """Takes a guess of that token that is after other guesses."""
    return next((i for i, guess in enumerate(draft.tokens) if guess == token and i > node), None)


def as_a_chain(run: Run, guesses: Iterable[int], parents: Sequence[int] | None = None) -> Any:
    return span_of(run, guesses, None)


def by_rank(draft: Draft, said: Sequence[int]) -> list[int]:
    return list(range(len(said) - 1))


@pytest.mark.parametrize("mutant", [first_child, any_guess, as_a_chain, by_rank, "stays where it is"])
def test_faults_in_how_a_tree_is_taken_are_seen(
    tiny: CpuMaker, answers: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Any] | str
) -> None:
    if mutant in (first_child, any_guess):
        monkeypatch.setattr(verification, "child", mutant)
        for module in (tree, passes):
            monkeypatch.setattr(module, "path", by_rank)
    elif mutant is as_a_chain:
        monkeypatch.setattr(passes, "span_of", mutant)
    elif mutant is by_rank:
        for module in (tree, passes):
            monkeypatch.setattr(module, "path", mutant)
    else:
        monkeypatch.setattr(passes.CpuPasses, "straighten", lambda *_: None)
    assert bushy(tiny, answers).run(REQUESTS) != answers


def test_a_branch_that_stays_where_it_is_is_seen_on_native(
    tiny_native: NativeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Replica(tiny_native(), policy="off").run(REQUESTS)
    told = {(tuple(r.ids.tolist()), 0): plain[r.handle, 0] for r in REQUESTS}
    replica = Replica(tiny_native(Bush, answers=told), options={"tokens": 7})
    assert replica.run(REQUESTS) == plain
    assert replica.accepted > len(replica.results)
    monkeypatch.setattr(NativeExecutor, "_straighten", lambda *_: None)
    assert Replica(tiny_native(Bush, answers=told), options={"tokens": 7}).run(REQUESTS) != plain


# ── what a tree is ───────────────────────────────────────────────────────────────────────────────


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 9)))]
    return Draft(draw(st.lists(st.integers(0, 4), min_size=len(parents), max_size=len(parents))), None, parents)


@settings(max_examples=200)
@given(trees(), st.integers(0, 9))
def test_what_is_said_is_what_would_be_said_token_by_token(draft: Draft, seed: int) -> None:
    """Rows that depend on the tokens before them, as a model's do: also with guesses that are there twice."""
    rows = np.stack([row_after(before(draft, node), seed) for node in range(-1, len(draft.tokens))])
    context = Context(Sampling(seed=seed, repetition=1.3), 0, 1, [1])
    for rule in ("coupled", "rejection"):
        said = verify(rows, draft, context, rule)
        nodes = tree.path(draft, said)
        assert before(draft, nodes[-1] if nodes else -1) == said[:-1]
        if rule == "coupled":
            for i, token in enumerate(said):
                alone = verify(row_after(said[:i], seed)[None], Draft(), context._replace(ids=[1, *said[:i]]))
                assert alone == [token]
            assert said[-1] not in [draft.tokens[i] for i in tree.children(draft, nodes[-1] if nodes else -1)]


def before(draft: Draft, node: int) -> list[int]:
    """The guesses up to a node."""
    assert draft.parents is not None
    return [] if node < 0 else [*before(draft, draft.parents[node]), draft.tokens[node]]


def row_after(tokens: list[int], seed: int) -> Logits:
    return np.random.default_rng([seed, *tokens]).normal(size=5).astype(np.float32)


def test_paths_are_cells_by_position() -> None:
    resident = Resident(1, [7, 8, 9], 1, 0, Sampling(), kv_len=2, table=array("i", [4, 2]))
    span = span_of(Run(0, resident, 2, 3, True, 4, 9), [10, 11, 12, 13], [-1, 0, 0, -1])
    assert span.ids == [9, 10, 11, 12, 13]
    assert span.paths == [[2], [2, 3], [2, 3, 4], [2, 3, 5], [2, 6]]


def test_the_likeliest_beginnings_are_a_tree_around_the_best_chain() -> None:
    levels = [[(5, np.log(0.6)), (6, np.log(0.4))], [(7, np.log(0.9)), (8, np.log(0.1))]]
    assert tree.likeliest(levels, 3) == Draft([5, 7, 6], None, [-1, 0, -1])
    assert tree.likeliest(levels, 9) == Draft([5, 7, 6, 7, 8, 8], None, [-1, 0, -1, 2, 0, 2])
    assert tree.likeliest([], 3) == Draft([], None, [])


class Wrong(Drafter):
    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [self._draft] * len(wants)


@dataclass
class Case:
    says: str
    draft: Draft
    trees: bool = True


@pytest.mark.parametrize(
    "case",
    [
        Case("it must be one before it", Draft([1, 2], None, [-1, 1])),
        Case("has 1 parents", Draft([1, 2], None, [-1])),
        Case("verifies chains", Draft([1, 2], None, [-1, -1]), trees=False),
    ],
    ids=lambda case: case.says,
)
def test_what_is_no_tree_costs_its_guesses(tiny: CpuMaker, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    drafting = Drafting(Wrong(case.draft), VOCAB, trees=case.trees)
    executor = cpu_executor.CpuExecutor(tiny().forward, tiny()._pool, tiny().facts, None, drafting)
    replica = Replica(executor, options={"tokens": 3})
    replica.run(REQUESTS[:1])
    assert replica.drafted == 0
    assert case.says in "".join(capsys.readouterr())


def test_a_chain_that_says_its_parents_is_a_chain(tiny: CpuMaker) -> None:
    drafting = Drafting(Wrong(Draft([1, 2], None, [-1, 0])), VOCAB)
    executor = cpu_executor.CpuExecutor(tiny().forward, tiny()._pool, tiny().facts, None, drafting)
    replica = Replica(executor, options={"tokens": 3})
    replica.run(REQUESTS[:1])
    assert replica.drafted > 0


# ── rejection ────────────────────────────────────────────────────────────────────────────────────

P = np.array([0.31, 0.05, 0.2, 0.01, 0.13, 0.3])
Q = np.array([0.1, 0.3, 0.1, 0.2, 0.2, 0.1])
ROW: Logits = np.log(P).astype(np.float32)


def siblings(draw: random.Random, n: int, certain: bool) -> list[tuple[int, Reals | None]]:
    """Guesses for one place: the likeliest under Q, or drawn from it one after another, each unlike those before."""
    if certain:
        return [(int(i), None) for i in np.argsort(-Q, kind="stable")[:n]]
    out: list[tuple[int, Reals | None]] = []
    q = Q.copy()
    for _ in range(n):
        q = q / q.sum()
        token = draw.choices(range(6), weights=q.tolist())[0]
        out.append((token, q))
        q = np.where(np.arange(6) == token, 0.0, q)
    return out


def counts(draws: int, n: int, certain: bool, judged: Callable[..., int] = judge) -> Reals:
    draw, out = random.Random(n), np.zeros(6)
    for seed in range(draws):
        out[judged(ROW, Context(Sampling(seed=seed), 0, 1, [1]), siblings(draw, n, certain))] += 1
    return out


@pytest.mark.parametrize(("n", "certain"), [(1, False), (2, False), (3, False), (2, True), (4, True)])
def test_several_guesses_for_a_place_keep_the_targets_distribution(
    n: int, certain: bool, pytestconfig: pytest.Config
) -> None:
    """Chi-square with 5 degrees of freedom passes 25.7 once in 10 000 times."""
    draws = 100_000 if pytestconfig.getoption("--speculation-all") else 6000
    assert chi_square(counts(draws, n, certain), P) < 25.7


def each_against_all(row: Logits, context: Context, guesses: Sequence[tuple[int, Reals | None]]) -> int:
    """Judges every guess as if it were the first."""
    for i, one in enumerate(guesses):
        if judge(row, context._replace(choice=i), [one]) == one[0]:
            return one[0]
    return judge(row, context, guesses[-1:])


def as_if_drawn_again(row: Logits, context: Context, guesses: Sequence[tuple[int, Reals | None]]) -> int:
    """Forgets that the second guess was drawn from what the first left."""
    return judge(row, context, [(token, Q) for token, _ in guesses])


@pytest.mark.parametrize("mutant", [each_against_all, as_if_drawn_again])
def test_broken_rules_for_several_guesses_are_seen(mutant: Callable[..., int]) -> None:
    assert chi_square(counts(6000, 3, False, mutant), P) > 25.7
