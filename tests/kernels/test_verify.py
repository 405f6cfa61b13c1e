"""Verification of drafts on the device: the walk of a tree, and rejection, against the executors' own rules."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from octavo.core.messages import Sampling
from octavo.executors.drafting import verification
from octavo.executors.drafting.contract import Draft
from octavo.executors.drafting.tree import depths
from octavo.executors.sampling import Context, distribution
from octavo.kernels.cuda import reference
from octavo.kernels.cuda.draws import draws
from octavo.kernels.cuda.launch import Kernels
from tests.kernels.conftest import Maker

VOCABULARY = 50


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_trees(kernels: Maker, order: int) -> None:
    assert max(walk(kernels(order), seed) for seed in range(4)) > 4


def walk(kernels: Kernels, seed: int) -> int:
    """Gives the longest walk. Chains, bushes and stars of up to 64 nodes, sequences without guesses; few tokens, so
    that guesses are often right."""
    chance = random.Random(seed)
    guesses: list[int] = []
    parents: list[int] = []
    drawn: list[int] = []
    firsts = [0]
    for _ in range(24):
        n = chance.choice([1, 2, 5, 64])
        far = chance.choice([1, 1, 6, n])  # how far a node's parent may be: 1 makes a chain
        parents += [-1] + [chance.randrange(max(0, i - far), i) if far < n else 0 for i in range(1, n)]
        tokens = (
            [0, 0, 0, 0, 1] if far < n or chance.random() < 0.5 else [*range(40)]
        )  # of many children, few are right
        guesses += [-1] + [chance.choice([-1, *tokens]) for _ in range(1, n)]
        drawn += [chance.choice([-1, *tokens * 2]) for _ in range(n)]
        firsts.append(firsts[-1] + n)
    said, path, counts = kernels.verify(ints(firsts), ints(guesses), ints(parents), ints(drawn))
    longest = 0
    for i, (first, end) in enumerate(pairwise(firsts)):
        mine = slice(first, end)
        count = int(counts[i])
        longest = max(longest, count)
        want = reference.verify(guesses[mine], parents[mine], drawn[mine])
        assert (said[first : first + count].tolist(), path[first : first + count].tolist()) == want
        if -1 not in drawn[mine]:
            tokens = drawn[mine]
            draft = Draft(guesses[mine][1:], None, [parent - 1 for parent in parents[mine][1:]])
            assert want[0] == verification.walk(len(tokens), draft, partial(row_of, tokens))
    return longest


def row_of(tokens: list[int], row: int, new: list[int]) -> int:
    return tokens[row]


SAMPLINGS = [
    Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=7),
    Sampling(temperature=1.0, min_p=0.02, seed=8),
    Sampling(temperature=1.3, typical_p=0.9, seed=2**63 - 1),
    Sampling(temperature=0.7, seed=-4),
]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_rejection(kernels: Maker, order: int) -> None:
    """Whole runs on the device: scores to distributions to tokens, as the executors' own rule has them."""
    assert {count for seed in range(6) for count in reject(kernels(order), seed)} >= {1, 2, 3, 4}


def tree_of(chance: random.Random, kind: str, n: int) -> list[int]:
    """Parents of n guesses."""
    far = {"chain": 1, "bush": 4, "star": n}[kind]
    return [-1 if kind == "star" else chance.randrange(max(-1, i - far), i) for i in range(n)]


def reject(kernels: Kernels, seed: int) -> list[int]:
    """Chains, bushes and stars, of certain guesses and of drawn ones, sequences without guesses; how many tokens come
    of each."""
    generator, chance = np.random.default_rng(seed), random.Random(seed)
    cases = [(kind, n, certain) for certain in (True, False) for kind, n in (("chain", 4), ("bush", 9), ("star", 6))]
    cases.insert(chance.randrange(len(cases)), ("chain", 0, True))
    firsts, guesses, parents, positions, whose, drawn_from = [0], [], [], [], [], []
    chances: list[np.ndarray] = []
    expected: list[list[int]] = []
    logits: list[np.ndarray] = []
    for i, (kind, n, certain) in enumerate(cases):
        rows = (generator.normal(size=(n + 1, VOCABULARY)) * 2).astype(np.float32)
        tree = tree_of(chance, kind, n)
        noisy = [rows[parent + 1] + generator.normal(size=VOCABULARY) * 0.5 for parent in tree]
        q = np.array([np.exp(row) / np.exp(row).sum() for row in noisy]).reshape(n, VOCABULARY)
        if seed % 2 and not certain:
            q[q < 0.02] = 0  # as under top-p: no unlikely token is guessed
            q /= q.sum(-1, keepdims=True)
        tokens = [int(generator.choice(VOCABULARY, p=one)) for one in q]
        draft = Draft(tokens, None if certain else q, None if kind == "chain" else tree)
        sampling = SAMPLINGS[(i + seed) % len(SAMPLINGS)]
        expected.append(verification.verify(rows, draft, Context(sampling, i, 2, [3, 1]), "rejection"))
        logits.append(rows)
        drawn_from += [-1] + ([-1] * n if certain else [len(chances) + k for k in range(n)])
        chances += [] if certain else [*q]
        guesses += [-1, *tokens]
        parents += [-1, *(parent + 1 for parent in tree)]
        positions += [2 + depth for depth in depths(Draft(tokens, None, tree))]
        whose += [(i, sampling)] * (n + 1)
        firsts.append(len(guesses))
    made = draws(len(guesses))
    for row, (i, sampling) in enumerate(whose):
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
            made[name][row] = getattr(sampling, name)
        made["seed"][row], made["choice"][row] = sampling.seed & 0xFFFFFFFFFFFFFFFF, i
    made["position"] = positions
    target = kernels.distributions(kernels.scores(torch.from_numpy(np.concatenate(logits)), made), made)
    told = torch.from_numpy(np.array(chances))
    said, counts = kernels.reject(ints(firsts), ints(guesses), ints(parents), target, told, ints(drawn_from), made)
    got = [said[first : first + int(n)].tolist() for first, n in zip(firsts, counts, strict=False)]
    assert got == expected
    return counts.tolist()


def test_distributions(kernels: Maker) -> None:
    for order in (0, 1, 2, 3):
        distributions(kernels(order))


def distributions(kernels: Kernels) -> None:
    rows = torch.randn(len(SAMPLINGS) + 2, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    rows[-1, 7] = torch.nan
    made = draws(len(rows))
    expected = np.zeros(rows.shape)
    for i, sampling in enumerate(SAMPLINGS):
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
            made[name][i] = getattr(sampling, name)
        ids, scores = distribution(rows[i].numpy(), Context(sampling, 0, 1, [3]))
        expected[i, ids] = np.exp(scores) / np.exp(scores).sum()
    expected[-2, int(rows[-2].argmax())] = 1.0  # greedy
    got = kernels.distributions(kernels.scores(rows, made), made)
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-13, atol=0)


def test_rejection_of_what_is_left_over(kernels: Maker) -> None:
    """Guesses from a distribution that is the target's go for nothing but for rounding, and a node that has no
    distribution ends what is said."""
    for order in (0, 1, 2, 3):
        left_over(kernels(order))


def left_over(kernels: Kernels) -> None:
    p = torch.zeros(6, VOCABULARY, dtype=torch.float64)
    p[[0, 4], 5], p[[0, 4], 6], p[1, 9] = 0.25, 0.75, 1.0
    made = draws(6)
    made["position"] = [3, 4, 4, 3, 3, 4]
    told = torch.stack((p[0], torch.zeros(VOCABULARY, dtype=torch.float64)))
    # A guess that p does not have, drawn from p itself, then a sure one; nobody; the first guess alone.
    firsts, guesses, parents = [0, 3, 4, 6], [-1, 8, 6, -1, -1, 8], [-1, 0, 0, -1, -1, 0]
    said, counts = kernels.reject(
        ints(firsts), ints(guesses), ints(parents), p, told, ints([-1, 0, 1, -1, -1, 0]), made
    )
    assert counts.tolist() == [2, 1, 1]
    assert said[[0, 1, 3]].tolist() == [6, -1, -1]
    assert int(said[4]) in (5, 6)
    tiny = torch.zeros(8, VOCABULARY, dtype=torch.float64)
    tiny[:, 3], tiny[:, 4] = 1e-310, 1e-320
    made, alone = draws(8), ints([-1] * 8)
    made["position"] = range(8)
    said, _ = kernels.reject(ints([*range(9)]), alone, alone, tiny, tiny, alone, made)
    assert said.tolist() == [3] * 8


def test_what_is_guessed_twice_is_the_first_that_guessed_it(kernels: Maker) -> None:
    """Also where the second is taken: after what is no distribution, so that the first goes for nothing. From there on
    `tree.path` follows what was said."""
    for order in (0, 1, 2, 3):
        guessed_twice(kernels(order))


def guessed_twice(kernels: Kernels) -> None:
    sequences, nodes = 40, 5
    p = torch.zeros(nodes, VOCABULARY, dtype=torch.float64)
    p[0, :10] = 0.1
    p[1, 7] = p[2, 8] = p[3, 9] = p[4, 9] = 1.0
    told = torch.ones(1, VOCABULARY, dtype=torch.float64)
    firsts = ints([*range(0, sequences * nodes + 1, nodes)])
    made = draws(sequences * nodes)
    made["position"] = np.arange(sequences * nodes)
    guesses, parents, drawn_from = (
        ints([*one] * sequences) for one in ([-1, 5, 5, 7, 8], [-1, 0, 0, 1, 2], [-1, 0, 0, -1, -1])
    )
    said, counts = kernels.reject(firsts, guesses, parents, p.repeat(sequences, 1), told, drawn_from, made)
    got = [tuple(one[:n]) for one, n in zip(said.reshape(sequences, nodes).tolist(), counts.tolist(), strict=True)]
    assert {one for one in got if len(one) > 1} == {(5, 7, 9)}
