"""Requests that come at once and begin alike: the first computes the beginning, the others take it from the tree."""

from __future__ import annotations

import pytest

from octavo.core.messages import Facts
from octavo.core.trace.catalogue import RequestMatched, StepPlanned
from octavo.executors.ghost import GhostExecutor
from tests.speculation.replica import Replica, asked

PREFIX = [3 + i % 50 for i in range(96)]
REQUESTS = 10


def ghost() -> GhostExecutor:
    return GhostExecutor(
        Facts(
            model_id="ghost", context=500, vocab_size=260, block_size=4, total_blocks=400, block_bytes=8, cache_seed=b""
        )
    )  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_that_many_wait_for_is_computed_about_once(depth: int) -> None:
    replica = Replica(ghost(), policy="off", slots=12, budget=48, depth=depth)
    replica.run([asked(i, [*PREFIX, 100 + i, 7, 8], tokens=4) for i in range(REQUESTS)])
    computed = sum(event.prefill_tokens for event in replica.events if isinstance(event, StepPlanned))
    once = len(PREFIX) + REQUESTS * 3
    assert computed < once + 2 * len(PREFIX)  # one or two begin before the first is far enough
    matches = [event.cached for event in replica.events if isinstance(event, RequestMatched)]
    assert matches.count(len(PREFIX)) > REQUESTS // 2


def test_who_begins_otherwise_is_not_asked_for_again() -> None:
    replica = Replica(ghost(), policy="off", slots=2, budget=48)
    replica.run([asked(i, [100 + i, *PREFIX], tokens=4) for i in range(REQUESTS)])
    assert len([event for event in replica.events if isinstance(event, RequestMatched)]) == REQUESTS


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_prompt_of_several_choices_is_computed_once(depth: int, tokens: int) -> None:
    """Also where the first choice ends with its first token, before the others could fork from it."""
    replica = Replica(ghost(), policy="off", slots=12, budget=200, depth=depth)
    replica.run([asked(0, PREFIX, tokens=tokens, n=4)])
    computed = sum(event.prefill_tokens for event in replica.events if isinstance(event, StepPlanned))
    assert computed <= len(PREFIX) + 3 * 4
