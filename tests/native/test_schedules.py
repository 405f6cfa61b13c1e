"""What a request gets is what it gets alone, through the production scheduler and KV-manager: whatever the company,
chunks, cache, preemptions and guesses, and when the executor dies on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from octavo.core.messages import Sampling
from octavo.core.trace.catalogue import RequestPreempted, StepBound
from octavo.executors.drafting.contract import Draft, Drafter, Want
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.program import Native, Pool
from tests.executors.driver import Driver
from tests.native.test_serves import ASKED, EvenThenOdd, Kv, Mode, native
from tests.native.test_serves import path as path
from tests.speculation.replica import Replica, asked

NEW = 20
SHARED = [(i * 29 + 3) % 97 for i in range(33)]
PROMPTS = {
    name: [*SHARED[: 16 * (i % 3)], *[(i * 31 + j * 7) % 97 for j in range(5 + i)]] for i, name in enumerate(ASKED)
}


class Mimic(Drafter):
    """Knows the answers, and tells some of them wrong."""

    def __init__(self, answers: list[list[int]]) -> None:
        self._answers = answers

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        return [Draft(self._guess(want.resident.tokens)[: want.most]) for want in wants]

    def _guess(self, tokens: list[int]) -> list[int]:
        known = next((answer for answer in self._answers if answer[: len(tokens)] == tokens), [])
        return [(token + (at % 4 == 0)) % 97 for at, token in enumerate(known)][len(tokens) :]


def pooled(loaded: NativeExecutor, blocks: int, drafter: Drafter | None = None, host_blocks: int = 0) -> NativeExecutor:
    facts = msgspec.structs.replace(loaded.facts, total_blocks=blocks, host_blocks=host_blocks, block_size=4)
    model = Native(loaded.model.weights, Pool(facts.places, 4, loaded.model.pool.kind), threads=2)
    return NativeExecutor(model, facts, EvenThenOdd(), Drafting(drafter, facts.vocab_size))


@pytest.mark.parametrize(("mode", "kv"), [("exact", "auto"), ("fast", "auto"), ("fast", "int8")])
def test_answers_are_those_of_each_alone(path: Path, mode: Mode, kv: Kv) -> None:
    loaded = native(path, mode, kv)
    alone: dict[str, list[int]] = {}
    for name, sampling in ASKED.items():
        driver = Driver(pooled(loaded, 64))
        alone[name] = driver.finish(driver.open(PROMPTS[name], sampling=sampling), NEW)
    answers = [PROMPTS[name] + alone[name] for name in ASKED]
    requests = [asked(i, PROMPTS[n], tokens=NEW, sampling=s) for i, (n, s) in enumerate(ASKED.items())]
    expected = {(i, 0): alone[name] for i, name in enumerate(ASKED)}
    tight = Replica(pooled(loaded, 40), policy="off", slots=6, budget=9)
    assert tight.run(requests) == expected
    assert any(event.__class__.__name__ == "RequestPreempted" for event in tight.events)
    swapping = Replica(pooled(loaded, 24, host_blocks=80), policy="off", slots=6, budget=9)
    assert swapping.run(requests) == expected
    assert sum(event.swapped_in for event in swapping.events if isinstance(event, StepBound)) > 0
    assert {event.mode for event in swapping.events if isinstance(event, RequestPreempted)} == {"swap"}
    guessing = Replica(pooled(loaded, 128, Mimic(answers)), options={"tokens": 3}, slots=8, budget=23, crash_at=9)
    assert guessing.run(requests) == expected
    assert guessing.drafted > guessing.accepted > 20


def test_guesses_change_no_log_probability(path: Path) -> None:
    loaded = native(path, "fast")
    sampling = Sampling(temperature=0.0, logprobs=2)
    driver = Driver(pooled(loaded, 64))
    alone = driver.open(SHARED, sampling=sampling)
    driver.finish(alone, NEW)
    guessing = Replica(pooled(loaded, 64, Mimic([alone.ids])), options={"tokens": 5})
    assert guessing.run([asked(0, SHARED, tokens=NEW, sampling=sampling)])[0, 0] == alone.output[:NEW]
    assert guessing.accepted > 5
    ours, theirs = guessing.logprobs[0, 0], alone.logprobs
    assert [(e.token, e.logprob, e.top_ids, e.top_logprobs) for e in ours if e is not None] == [
        (e.token, e.logprob, e.top_ids, e.top_logprobs) for e in theirs if e is not None
    ]
