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
from octavo.executors.drafting.verification import judge
from octavo.executors.sampling import Context, distribution
from octavo.executors.sampling import sample as expected_token
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


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_rejection(kernels: Maker, order: int) -> None:
    assert len({reject(kernels(order), seed) for seed in range(6)}) > 1


def reject(kernels: Kernels, seed: int) -> int:
    """Three sequences; gives how many tokens came of them. The device does to a row what `judge` does."""
    generator = np.random.default_rng(seed)
    guessed = [4, 0, 6]
    firsts = np.cumsum([0, *(n + 1 for n in guessed)])
    rows = generator.normal(size=(int(firsts[-1]), VOCABULARY)).astype(np.float32) * 2
    certain = seed % 2 == 0
    noisy = rows + generator.normal(size=rows.shape) * 0.3
    chances = np.exp(noisy) / np.exp(noisy).sum(-1, keepdims=True)
    guesses = np.array([generator.choice(VOCABULARY, p=row) for row in chances], dtype=np.int32)
    target, made = np.zeros(rows.shape), draws(len(rows))
    expected: list[list[int]] = []
    for i, n in enumerate(guessed):
        sampling = Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=100 + seed)
        new: list[int] = []
        for k in range(n + 1):
            row = int(firsts[i]) + k
            context = Context(sampling, i, 2, [3, 1, *guesses[int(firsts[i]) : row].tolist()])
            ids, scores = distribution(rows[row], context)
            target[row, ids] = np.exp(scores) / np.exp(scores).sum()
            made["seed"][row], made["choice"][row], made["position"][row] = sampling.seed, i, len(context.ids)
            if len(new) == k:  # every guess before was right
                last = k == n
                guess = -1 if last else int(guesses[row])
                token = (
                    expected_token(rows[row], context)
                    if last
                    else judge(rows[row], context, [(guess, None if certain else chances[row])])
                )
                new += [token] if token == guess or last else [token, -1]
        expected.append(new[: new.index(-1)] if -1 in new else new)
    tokens, counts = kernels.reject(
        ints(firsts.tolist()),
        torch.from_numpy(guesses),
        torch.from_numpy(target),
        None if certain else torch.from_numpy(chances),
        made,
    )
    got = [tokens[int(first) : int(first) + int(n)].tolist() for first, n in zip(firsts, counts, strict=False)]
    assert got == expected
    return int(counts.sum())
