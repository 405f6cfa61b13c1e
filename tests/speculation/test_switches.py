"""H48 of the list of cases: another engine crashed only with one mix of options. Here all mixes give the same
answers."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from tests.executors.tiny import VOCAB
from tests.speculation.conftest import CpuMaker
from tests.speculation.replica import Replica, asked

Answers = list[dict[tuple[int, int], list[int]]]


def answers(tiny: CpuMaker, *, cache: bool, chunks: bool, drafter: str | None, slots: int) -> Answers:
    """Six prompts twice, some with a common beginning, some that repeat themselves; chunks are of eight tokens."""
    draw = random.Random(48)
    shared = [draw.randrange(VOCAB) for _ in range(14)]
    prompts = [shared, [*shared, 3], shared * 2, [5, 6] * 9, [7], [*shared, 9, 9, 9]]
    more: dict[str, Any] = {"policy": "fixed", "options": {"tokens": 3}} if drafter else {"policy": "off"}
    replica = Replica(tiny(drafter), caching=cache, slots=slots, budget=8 if chunks else 512, **more)
    rounds = []
    for again in (0, len(prompts)):
        said = replica.run([asked(again + i, prompt, tokens=16) for i, prompt in enumerate(prompts)])
        rounds.append({(handle - again, choice): ids for (handle, choice), ids in said.items()})
    if drafter:
        assert replica.accepted > 0
    return rounds


@pytest.fixture(scope="module")
def plain(tiny: CpuMaker) -> Answers:
    plain = answers(tiny, cache=False, chunks=False, drafter=None, slots=1)
    assert plain[0] == plain[1]
    return plain


@pytest.mark.parametrize(
    ("cache", "chunks", "drafter", "slots"), list(product([False, True], [False, True], [None, "ngram"], [1, 16]))
)
def test_h48_every_mix_of_switches_gives_the_same_answers(
    tiny: CpuMaker, plain: Answers, cache: bool, chunks: bool, drafter: str | None, slots: int
) -> None:
    assert answers(tiny, cache=cache, chunks=chunks, drafter=drafter, slots=slots) == plain
