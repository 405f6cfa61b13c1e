"""Guesses that branch. Node i of a tree is guess i, node -1 what was said last; a node comes after its parent:

    parents  -1  0  0  -1      last ─┬─ 0 ─┬─ 1      rows of logits: of the last token, then of each guess,
    nodes     0  1  2   3            │     └─ 2      so node i's is number i + 1
                                     └─ 3

A chain has parents -1, 0, 1, … and is written as None.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from octavo.core.models.errors import ModelError
from octavo.executors.drafting.contract import Draft, Host
from octavo.executors.residents import Run


def need_trees(host: Host, drafter: str) -> None:
    """Raises `ModelError` where trees are not verified."""
    if not host.trees:
        raise ModelError(
            f"this executor verifies chains of guesses, no trees: take the drafter {drafter} with "
            "speculation.options.width = 1, or executor.kind = native"
        )


def check(draft: Draft) -> None:
    """Raises `ValueError` for parents that make no tree."""
    if draft.parents is None:
        return
    if len(draft.parents) != len(draft.tokens):
        raise ValueError(f"a draft of {len(draft.tokens)} guesses has {len(draft.parents)} parents")
    for i, parent in enumerate(draft.parents):
        if not -1 <= parent < i:
            raise ValueError(f"guess {i} of a draft comes after guess {parent}; it must be one before it, or -1")


def children(draft: Draft, node: int) -> list[int]:
    if draft.parents is None:
        return [node + 1] if node + 1 < len(draft.tokens) else []
    return [i for i, parent in enumerate(draft.parents) if parent == node]


def depths(draft: Draft) -> list[int]:
    """How many guesses are before each row: none before the last token's, then of each guess, itself included."""
    if draft.parents is None:
        return list(range(len(draft.tokens) + 1))
    levels = [0]  # of node i at i + 1
    for parent in draft.parents:
        levels.append(levels[parent + 1] + 1)
    return levels


def depth(draft: Draft) -> int:
    """How many places there are guesses for."""
    return len(draft.tokens) if draft.parents is None else max(depths(draft))


def child(draft: Draft, node: int, token: int) -> int | None:
    """The first child of a node that guesses this token."""
    return next((i for i in children(draft, node) if draft.tokens[i] == token), None)


def ancestors(draft: Draft, node: int) -> list[int]:
    """A node and those that it comes after, the first one first; none of node -1."""
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = node - 1 if draft.parents is None else draft.parents[node]
    return nodes[::-1]


def path(draft: Draft, said: Sequence[int]) -> list[int]:
    """The nodes of guesses that were right, where a step said these tokens: all but the last were guessed."""
    nodes = [-1]
    for token in said[:-1]:
        node = child(draft, nodes[-1], token)
        assert node is not None, "a token was taken that nobody guessed"
        nodes.append(node)
    return nodes[1:]


def kept(run: Run, draft: Draft, said: Sequence[int]) -> list[int]:
    """Of a run's rows those that stay: its own tokens, and the guesses that were right."""
    own = run.end - run.start
    return [*range(own), *(own + node for node in path(draft, said))]


def likeliest(levels: Sequence[Sequence[tuple[int, float]]], most: int) -> Draft:
    """The `most` likeliest beginnings, where the token at each depth does not depend on those before: `levels[d]` are
    (token, log-probability), best first. The best chain is contained."""
    tokens: list[int] = []
    parents: list[int] = []
    # Beginnings whose parents are taken, by log-probability: depth, rank, parent, log-probability of the parent.
    open_: list[tuple[float, int, int, int, float]] = []

    def offer(depth: int, rank: int, parent: int, before: float) -> None:
        if depth < len(levels) and rank < len(levels[depth]):
            heapq.heappush(open_, (-(before + levels[depth][rank][1]), depth, rank, parent, before))

    offer(0, 0, -1, 0.0)
    while open_ and len(tokens) < most:
        cost, depth, rank, parent, before = heapq.heappop(open_)
        offer(depth, rank + 1, parent, before)
        offer(depth + 1, 0, len(tokens), -cost)
        tokens.append(levels[depth][rank][0])
        parents.append(parent)
    return Draft(tokens, None, parents)
