"""The plan that the device makes is the one that Python makes, whatever the queries."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS
from octavo.kernels.cuda.launch import Kernels, Staged
from octavo.kernels.cuda.plan import ROUND, TILE, Query, fitting_split, plan
from tests.kernels.conftest import Maker

GROUP = 3
NO_SPLIT = 1 << 30


def crowd(seed: int, n: int) -> list[Query]:
    """Decodes, short and long chunks, and places that are not taken (no tokens)."""
    chance, made, first = random.Random(seed), [], 0
    for i in range(n):
        tokens = chance.choice([0, 1, 1, 1, 2, 5, 40, 70])
        made.append(Query(i, first, tokens, tokens + chance.choice([0, 3, 63, 100, 700]) if tokens else 0))
        first += tokens
    return made


def planned(kernels: Kernels, queries: list[Query], rows: int, works: int = 4000, **how: int) -> Staged:
    lengths = torch.tensor([query.length for query in queries], dtype=torch.int32)
    firsts = torch.tensor([0, *(query.first + query.tokens for query in queries)], dtype=torch.int32)
    staged = kernels.room(works, works, works, rows, 2, 16)
    kernels.plan(staged, lengths, firsts, GROUP, **how)
    return staged


def same(staged: Staged, queries: list[Query], rows: int, split: int, window: int, step: int = TILE) -> None:
    expected = plan(queries, GROUP, rows, split, window, step)
    assert staged.counts is not None
    assert staged.counts[:3].tolist() == [len(expected.works), len(expected.merges), expected.parts]
    assert staged.works[: len(expected.works)].tolist() == expected.works.tolist()
    assert staged.merges[: len(expected.merges)].tolist() == expected.merges.tolist()


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("split", [64, 512, NO_SPLIT])
@pytest.mark.parametrize(("order", "n", "rows"), [(0, 9, DECODE_ROWS), (1, 60, PREFILL_ROWS), (3, 300, DECODE_ROWS)])
def test_with_a_fixed_split(kernels: Maker, order: int, n: int, rows: int, split: int, window: int) -> None:
    queries = crowd(n, n)
    for step in (TILE, ROUND):
        staged = planned(kernels(order), queries, rows, split=split, window=window, step=step)
        same(staged, queries, rows, 0 if split == NO_SPLIT else split, window, step)


@pytest.mark.parametrize("fill", [10, 64, 264, 5000])
def test_with_the_split_that_fills_the_device(kernels: Maker, fill: int) -> None:
    queries = crowd(5, 40)
    staged = planned(kernels(2), queries, DECODE_ROWS, split=0, fill=fill)
    assert staged.counts is not None
    split = int(staged.counts[3])
    assert split == fitting_split(queries, GROUP, DECODE_ROWS, fill // 2)  # two KV heads
    same(staged, queries, DECODE_ROWS, split, 0)


def test_each_kernel_has_its_own_queries(kernels: Maker) -> None:
    queries = crowd(8, 50)
    few = [query for query in queries if query.tokens * GROUP <= DECODE_ROWS]
    for least, most, mine in (
        (1, DECODE_ROWS, few),
        (DECODE_ROWS + 1, 2**31 - 1, [q for q in queries if q not in few]),
    ):
        staged = planned(kernels(0), queries, DECODE_ROWS, split=64, least=least, most=most)
        same(staged, mine, DECODE_ROWS, 64, 0)


def test_what_there_is_no_room_for_is_counted_and_not_written(kernels: Maker) -> None:
    queries = crowd(3, 30)
    expected = plan(queries, GROUP, DECODE_ROWS, 64)
    staged = planned(kernels(1), queries, DECODE_ROWS, works=10, split=64)
    assert staged.counts is not None
    assert int(staged.counts[0]) == len(expected.works) > 10
    assert staged.works.tolist() == expected.works[:10].tolist()
