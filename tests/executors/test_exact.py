"""A sequence's tokens, and the bits behind them, do not depend on its company or on how it came to be computed."""

from __future__ import annotations

import random

import pytest

from octavo.core.messages import Sampling, TokenLogprob
from tests.executors.conftest import Maker
from tests.executors.driver import DECODE, GREEDY, Driver, Sequence

SEEDED = Sampling(temperature=0.9, top_p=0.95, repetition=1.1, seed=11)


def bits(entries: list[TokenLogprob | None]) -> list[tuple[int, float, list[int], list[float]]]:
    """Log-probabilities are a window on the logits: equal ones to the last bit mean equal logits."""
    return [(e.token, e.logprob, e.top_ids, e.top_logprobs) for e in entries if e is not None]


def prompt(seed: int, n: int, vocab: int = 97) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(vocab) for i in range(n)]


def alone(make: Maker, ids: list[int], sampling: Sampling, new: int, choice: int = 0) -> Sequence:
    driver = Driver(make())
    sequence = driver.open(ids, sampling=sampling, choice=choice)
    driver.finish(sequence, new)
    return sequence


NEW = 4


@pytest.mark.parametrize("seed", range(10))
def test_any_schedule_gives_what_a_sequence_gives_alone(tiny: Maker, seed: int) -> None:
    """Random chunks, mixes, block sizes, preemptions and warm starts; greedy and sampled, with log-probabilities."""
    draw = random.Random(seed)
    driver = Driver(tiny(block_size=draw.choice([1, 3, 16]), tokens=4096), seed)
    lengths = [draw.choice([1, 2, 17, 40, 70, 150]) for _ in range(draw.randint(1, 5))]
    samplings = [
        Sampling(temperature=0.8 * (i % 2), seed=i, top_k=20 * (i % 3), logprobs=3) for i in range(len(lengths))
    ]
    prompts = [prompt(i % 3, n) for i, n in enumerate(lengths)]
    live = [driver.open(ids, sampling=s) for ids, s in zip(prompts, samplings, strict=True)]
    produced: list[list[TokenLogprob | None]] = [[] for _ in live]
    while waiting := [i for i, s in enumerate(live) if len(s.output) < NEW]:
        if draw.random() < 0.2:  # preempt: all is recomputed, or found in what another has computed
            i = draw.choice(waiting)
            produced[i] += live[i].logprobs
            warm = draw.choice([None, *(s for s in live if s.kv_len)])
            driver.release(live[i])
            live[i] = driver.open(live[i].ids, prompt_len=live[i].prompt_len, sampling=samplings[i], warm=warm)
        chosen = draw.sample(waiting, draw.randint(1, len(waiting)))
        driver.step(*(_piece(live[i], draw.randint(1, 100)) for i in chosen))
    for i, sequence in enumerate(live):
        expected = alone(tiny, prompts[i], samplings[i], NEW)
        assert sequence.output == expected.output
        assert bits(produced[i] + sequence.logprobs) == bits(expected.logprobs)


def _piece(sequence: Sequence, n: int) -> tuple[Sequence, int]:
    if sequence.left == 1 and sequence.output and n % 2:
        return sequence, DECODE
    return sequence, min(n, sequence.left)


LENGTHS = (1, 2, 15, 33, 70, 200)
MIXED = [GREEDY if i % 2 else SEEDED for i in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def single(smol: Maker) -> list[list[int]]:
    """What each of `LENGTHS` gives alone, in one chunk."""
    return [alone(smol, prompt(9, n, 49152), s, NEW).output for n, s in zip(LENGTHS, MIXED, strict=True)]


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 64), (3, 7), (16, 200)])
def test_the_default_model_is_exact(smol: Maker, single: list[list[int]], block_size: int, chunk: int) -> None:
    """All together, in chunks, and the last with a warm prefix."""
    prompts = [prompt(9, n, 49152) for n in LENGTHS]
    driver = Driver(smol(block_size=block_size))
    first = driver.open(prompts[-1][:150])
    driver.finish(first, 1)
    opened = [driver.open(ids, sampling=s) for ids, s in zip(prompts[:-1], MIXED[:-1], strict=True)]
    opened.append(driver.open(prompts[-1], sampling=MIXED[-1], warm=first))
    assert opened[-1].kv_len > 100
    while live := [s for s in opened if len(s.output) < NEW]:
        driver.advance(live, chunk)
    assert [s.output for s in opened] == single


def test_a_fork_goes_on_as_its_parent_would(tiny: Maker) -> None:
    """Also when the parent writes on in the tail block that was copied."""
    ids = prompt(4, 37)
    driver = Driver(tiny(block_size=8))
    parent = driver.open(ids, sampling=SEEDED)
    driver.step((parent, 37))
    twin = driver.fork(parent, 30, ids[30:], sampling=SEEDED)
    other = driver.fork(parent, 36, ids[36:], sampling=SEEDED, choice=1)
    driver.step((parent, DECODE), (twin, 7), (other, 1))
    while live := [s for s in (parent, twin, other) if len(s.output) < 5]:
        driver.advance(live)
    assert parent.output == twin.output == alone(tiny, ids, SEEDED, 5).output
    assert other.output == alone(tiny, ids, SEEDED, 5, choice=1).output
    assert other.output != parent.output


def test_choices_and_seeds_differ(tiny: Maker) -> None:
    ids = prompt(5, 20)
    outputs = {
        (seed, choice): tuple(alone(tiny, ids, Sampling(seed=seed), 8, choice).output)
        for seed in (1, 2)
        for choice in (0, 1)
    }
    assert len(set(outputs.values())) == 4
