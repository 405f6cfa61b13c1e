"""The sampler: Philox against its authors' vectors, and laws that hold for any row of logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.messages import Sampling
from octavo.executors.philox import Purpose, block, philox4x32, uniforms
from octavo.executors.sampling import Context, Logits, best, keep, logprob, penalise, sample

ONES = 0xFFFFFFFF

# From the Random123 distribution, kat_vectors, philox4x32 with 10 rounds.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

rows = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0, 2.25]), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.01, 0.7, 1.0, 5.0]),
    top_k=st.integers(0, 50),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition=st.sampled_from([0.8, 1.0, 1.3]),
    presence=st.sampled_from([0.0, 0.5]),
    frequency=st.sampled_from([-0.5, 0.0, 0.5]),
    seed=st.integers(0, 2**63 - 1),
)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(philox4x32(counter, key[0] | key[1] << 32)[0].tolist()) == expected
    assert block(counter, key[0] | key[1] << 32) == expected


def test_an_id_keeps_its_number_whatever_ids_are_asked_for() -> None:
    everything = uniforms(np.arange(1001), 5, 1, 77, Purpose.SAMPLE)
    some = np.array([0, 3, 4, 5, 20, 77, 300, 301, 500, 997, 999, 1000])
    assert np.array_equal(uniforms(some, 5, 1, 77, Purpose.SAMPLE), everything[some])
    for n in range(len(some)):  # a few are worked out otherwise
        assert np.array_equal(uniforms(some[:n], 5, 1, 77, Purpose.SAMPLE), everything[some[:n]])
    assert ((everything > 0) & (everything < 1)).all()
    for other in ((6, 1, 77), (5, 2, 77), (5, 1, 78)):
        assert not np.isin(uniforms(np.arange(1001), *other, Purpose.SAMPLE), everything).any()


@given(rows)
def test_greedy_is_the_first_of_the_greatest(row: Logits) -> None:
    token = sample(row, Context(Sampling(temperature=0.0), 0, 0, []))
    assert row[token] == row.max()
    assert (row[:token] < row[token]).all()


@settings(max_examples=200)
@given(rows, samplings, st.data())
def test_a_draw_is_kept_and_the_same_again(row: Logits, sampling: Sampling, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=8))
    context = Context(sampling, 0, min(2, len(ids)), ids)
    token = sample(row, context)
    scores = penalise(row.astype(np.float64), context) / sampling.temperature
    assert token in keep(scores - scores.max(), sampling)
    assert token == sample(row.copy(), context)


@given(rows, samplings)
def test_what_is_kept_is_never_less_likely_than_what_is_not(row: Logits, sampling: Sampling) -> None:
    scores = row.astype(np.float64)
    kept = keep(scores, sampling)
    rest = np.setdiff1d(np.arange(len(row)), kept)
    assert len(kept) >= 1
    assert (np.diff(kept) > 0).all()
    assert len(rest) == 0 or scores[kept].min() >= scores[rest].max()
    if sampling.top_k:
        assert len(kept) <= sampling.top_k


@given(rows, st.sampled_from([0.01, 0.3, 0.9, 0.999]))
def test_top_p_is_the_smallest_set_that_reaches_p(row: Logits, p: float) -> None:
    kept = keep(row.astype(np.float64), Sampling(top_p=p))
    probs = np.exp(row.astype(np.float64))
    probs /= probs.sum()
    assert probs[kept].sum() >= p - 1e-12
    assert probs[kept].sum() - probs[kept].min() < p + 1e-12


@given(rows, st.integers(0, 50))
def test_best_is_a_stable_sort(row: Logits, n: int) -> None:
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:n]
    assert best(row.astype(np.float64), n).tolist() == expected


@given(rows, st.integers(0, 5))
def test_logprobs_are_the_raw_distribution(row: Logits, n: int) -> None:
    entry = logprob(row, 0, n)
    exact = row.astype(np.float64) - math.log(np.exp(row.astype(np.float64)).sum())
    assert entry.logprob == pytest.approx(exact[0])
    assert entry.top_logprobs == pytest.approx(sorted(exact, reverse=True)[: min(n, len(row))])


def test_a_hopeless_token_has_a_finite_logprob() -> None:
    assert logprob(np.array([0.0, -3e38], dtype=np.float32), 1, 2).logprob == -9999.0


def test_penalties_count_as_they_should() -> None:
    context = Context(Sampling(repetition=2.0, presence=0.25, frequency=0.5), 0, 2, [0, 1, 2, 2])
    scores = penalise(np.array([4.0, -4.0, 4.0, 4.0]), context)
    assert scores.tolist() == [2.0, -8.0, 2.0 - 0.25 - 2 * 0.5, 4.0]


def test_draws_follow_the_distribution() -> None:
    """10 000 seeds: a chi-square of 3 degrees of freedom passes 25 once in 60 000 times, and the seeds are fixed."""
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    row, n = np.log(probs).astype(np.float32), 10_000
    draws = [sample(row, Context(Sampling(seed=seed), 0, 0, [])) for seed in range(n)]
    counts = np.bincount(draws, minlength=4)
    assert ((counts - n * probs) ** 2 / (n * probs)).sum() < 25


def test_a_tiny_temperature_is_greedy() -> None:
    row = np.random.default_rng(1).normal(size=500).astype(np.float32)
    assert sample(row, Context(Sampling(temperature=1e-30), 0, 0, [])) == row.argmax()
