"""Sampled answers have the target's exact distribution, whoever guesses and by whichever rule: whole answers through
scheduler, KV-manager and executor, against probabilities that another implementation of the model computes.

Each draw is an answer of a choice of its own; what is counted are its first three tokens, of which the later two are
guessed before. Broken rules are caught by the same test of fewer draws.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from octavo.core.messages import Sampling
from octavo.executors.drafting import verification
from octavo.executors.drafting.contract import Draft
from octavo.executors.drafting.eagle_head import save_head
from octavo.executors.drafting.medusa import Head, save_heads
from octavo.executors.drafting.verification import Rule
from octavo.executors.sampling import Context, Ids, Reals, distribution
from octavo.plugins.speculation.homogeneity import Homogeneity
from tests.executors.tiny import save_tiny
from tests.speculation.conftest import NativeMaker
from tests.speculation.replica import Replica, asked
from tests.speculation.test_eagle import random_head

VOCAB = 8
PROMPT = [1, 2, 3, 1, 2, 3, 4, 1, 2]
SAMPLING = Sampling(temperature=1.6, top_p=0.97, repetition=1.1, presence=0.2)
COUNTED = 3
CHOICES, TOGETHER = 128, 4
"""Choices of a request; requests that run at once."""
DRAWS = 102_400
FEW = 512
"""In the suite, and of some of the grid; all with `--speculation-all`."""
QUICK = {("self", "rejection"), ("medusa tree", "rejection"), ("self", "coupled")}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("ngram", {"shortest": 1}),
    "suffix": ("suffix", {"shortest": 1}),
    "draft-model": ("draft-model", {"model": "small"}),
    "self": ("self", {"layers": 1}),
    "medusa": ("medusa", {"heads": "medusa"}),
    "medusa tree": ("medusa", {"heads": "medusa", "width": 3}),
    "eagle": ("eagle", {"head": "eagle"}),
    "eagle tree": ("eagle", {"head": "eagle", "width": 3}),
}
RULES: tuple[Rule, ...] = ("coupled", "rejection")
LEVEL = 0.001 / (len(DRAFTERS) * len(RULES))
"""Of each test, so that the whole grid fails by chance once in a thousand times."""


class Small(NamedTuple):
    maker: NativeMaker
    folder: Path
    exact: Reals
    """Probability of the first tokens, [VOCAB] * COUNTED."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A model of two layers with a small vocabulary, beside it what drafters need, all of random weights."""
    folder, draw = tmp_path_factory.mktemp("sampled"), torch.Generator().manual_seed(2)
    model = save_tiny(folder / "model", num_hidden_layers=2, vocab_size=VOCAB)
    save_tiny(folder / "small", num_hidden_layers=1, hidden_size=24, num_attention_heads=3, num_key_value_heads=1,
              vocab_size=VOCAB)  # fmt: skip
    block = torch.zeros(48, 48), torch.zeros(48)
    save_heads(folder / "medusa", [Head([block], torch.randn(VOCAB, 48, generator=draw) * 0.3) for _ in range(3)])
    save_head(folder / "eagle", random_head(third=False))
    return Small(NativeMaker(str(folder / "model")), folder, exact(model))


@torch.inference_mode()
def exact(model: Any) -> Reals:
    joint: Reals = np.ones([VOCAB] * COUNTED)
    for depth in range(COUNTED):
        for before in itertools.product(range(VOCAB), repeat=depth):
            ids = [*PROMPT, *before]
            row = model(torch.tensor([ids])).logits[0, -1].float().numpy()
            tokens, scores = distribution(row, Context(SAMPLING, 0, len(PROMPT), ids))
            p = np.zeros(VOCAB)
            p[tokens] = np.exp(scores) / np.exp(scores).sum()
            joint[before] *= p.reshape(-1, *[1] * (COUNTED - depth - 1))
    return joint


def counted(small: Small, name: str, rule: Rule, draws: int) -> tuple[Reals, Replica]:
    """How often each beginning was said."""
    drafter, options = DRAFTERS[name]
    paths: dict[str, Any] = {
        key: str(small.folder / value) if isinstance(value, str) else value for key, value in options.items()
    }
    executor = small.maker(drafter, rule=rule, tokens=16384, **paths)
    width = options.get("width", 1)
    most = COUNTED - 1 if width == 1 else width
    counts: Reals = np.zeros([VOCAB] * COUNTED)
    replica = Replica(executor, options={"tokens": most}, slots=CHOICES * TOGETHER, budget=4096, depth=1)
    for seeds in seeds_of(draws):
        replica.said.clear()
        replica.run([
            asked(seed, PROMPT, tokens=most + 2, n=CHOICES,  # the first is not guessed, the last never
                  sampling=Sampling(temperature=SAMPLING.temperature, top_p=SAMPLING.top_p, seed=seed,
                                    repetition=SAMPLING.repetition, presence=SAMPLING.presence))
            for seed in seeds
        ])  # fmt: skip
        np.add.at(counts, tuple(np.array([ids[:COUNTED] for ids in replica.said.values()]).T), 1)
    return counts, replica


def seeds_of(draws: int) -> Iterator[range]:
    return (range(at, at + TOGETHER) for at in range(0, draws // CHOICES, TOGETHER))


def against(counts: Reals, p: Reals) -> Homogeneity:
    """Chi-square of counts against probabilities; what is expected fewer than five times is one kind. What cannot be
    said and was is told from all else."""
    expected, seen = p.ravel() * counts.sum(), counts.ravel()
    if seen[expected == 0].any():
        return Homogeneity(float("inf"), 1)
    often = expected >= 5
    kinds = [*zip(seen[often], expected[often], strict=True)]
    if (rest := float(expected[~often].sum())) > 0:
        kinds.append((seen[~often].sum(), rest))
    return Homogeneity(float(sum((a - b) ** 2 / b for a, b in kinds)), len(kinds) - 1)


@pytest.mark.timeout(1200)  # the whole grid's rows, on a busy machine
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_answers_have_the_targets_distribution(
    small: Small, name: str, rule: Rule, root: Path, pytestconfig: pytest.Config
) -> None:
    every = pytestconfig.getoption("--speculation-all")
    if not every and (name, rule) not in QUICK:
        pytest.skip("needs --speculation-all")
    counts, replica = counted(small, name, rule, DRAWS if every else FEW)
    assert 0 < replica.accepted < replica.drafted
    found = against(counts, small.exact)
    if every:
        write(root / "tests/results/speculation_sampled.md", name, rule, found, replica)
    assert found.p >= LEVEL, found


# ── rules that are broken ────────────────────────────────────────────────────────────────────────

Remaining = Callable[[Ids, Reals, int, Reals | None, float], Reals | None]


def any_guess(ids: Ids, weights: Reals, guess: int, chances: Reals | None, lot: float) -> Reals | None:
    return None


def by_p_alone(ids: Ids, weights: Reals, guess: int, chances: Reals | None, lot: float) -> Reals | None:
    p = weights / weights.sum()
    return None if lot < p[ids == guess].sum() else np.maximum(p - (chances[ids] if chances is not None else 0), 0)


def from_all_of_p(ids: Ids, weights: Reals, guess: int, chances: Reals | None, lot: float) -> Reals | None:
    return None if verification_remaining(ids, weights, guess, chances, lot) is None else weights


def never(ids: Ids, weights: Reals, guess: int, chances: Reals | None, lot: float) -> Reals | None:
    """Another token than the guess, always."""
    rest = np.where(ids == guess, 0.0, weights)
    return rest if rest.sum() > 0 else weights


verification_remaining = verification.remaining


@pytest.mark.parametrize(
    ("name", "broken", "draws"),
    [
        ("self", any_guess, FEW), ("self", by_p_alone, 4 * FEW), ("self", from_all_of_p, 4 * FEW),
        ("self", never, 8 * FEW), ("medusa tree", any_guess, FEW), ("medusa tree", from_all_of_p, 4 * FEW),
    ],
)  # fmt: skip
def test_broken_rules_of_rejection_are_seen(
    small: Small, name: str, broken: Remaining, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where guesses are certain, as those of heads are, p alone is the rule."""
    monkeypatch.setattr(verification, "remaining", broken)
    counts, _ = counted(small, name, "rejection", draws)
    assert against(counts, small.exact).p < LEVEL


@pytest.mark.parametrize("name", ["self", "medusa tree"])
def test_a_coupled_guess_that_is_taken_unseen_is_seen(small: Small, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk goes down to the first guess, whatever the sampler says."""

    def first(rows: int, draft: Draft, say: Callable[[int, list[int]], int]) -> list[int]:
        return [draft.tokens[0], say(1, [draft.tokens[0]])] if draft.tokens and rows > 1 else [say(0, [])]

    monkeypatch.setattr(verification, "walk", first)
    monkeypatch.setattr("octavo.executors.native.executor.walk", first)
    counts, _ = counted(small, name, "coupled", FEW)
    assert against(counts, small.exact).p < LEVEL


# ── what the whole grid found ────────────────────────────────────────────────────────────────────

_ABOUT = f"""# Sampled answers against the exact distribution

A random model of two layers with {VOCAB} tokens, executor `native`, temperature {SAMPLING.temperature}, penalties,
top-p {SAMPLING.top_p}; {DRAWS} answers in each row, seeds fixed, through scheduler, KV-manager and executor.
Their first {COUNTED} tokens are counted against the probabilities that transformers computes of the same weights
(chi-square).
The level is 0.001 over all rows together: a p below {LEVEL:.1e} fails.
Written by `pytest tests/speculation/test_sampled.py --speculation-all`.

| drafter | rule | guesses verified | right | chi-square | degrees | p |
|---|---|---|---|---|---|---|
"""


def write(file: Path, name: str, rule: Rule, found: Homogeneity, replica: Replica) -> None:
    """With what was found of the others before."""
    known = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = {tuple(row.split(" | ")[:2]): row for row in known if row.startswith("| ") and row[2:9] != "drafter"}
    row = (
        f"| {name} | {rule} | {replica.drafted} | {replica.accepted} | {found.statistic:.1f} | {found.degrees} | "
        f"{found.p:.3f} |"
    )
    rows[tuple(row.split(" | ")[:2])] = row
    order: list[tuple[str, ...]] = [(f"| {each}", one) for one in RULES for each in DRAFTERS]
    lines = [rows[key] for key in sorted(rows, key=order.index)]
    file.write_text(_ABOUT + "\n".join(lines) + "\n", encoding="utf-8")
