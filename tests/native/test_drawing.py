"""Draws in the library are the sampler's, at every level that this processor has."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.messages import Sampling
from octavo.executors.native.drawing import only_warm
from octavo.executors.native.library import Isa
from octavo.executors.sampling import Context, sample
from tests.native.net import levels, library

ROWS = [(97, 1.0), (64, 3.0), (1000, 0.0), (4099, 10.0), (49152, 3.0)]
"""Ids, and how far their logits are spread: 0 are equal ones, which only noise tells apart."""


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 0.7, 1.0, 2.0, 50.0])
def test_a_draw_is_the_samplers(temperature: float) -> None:
    draws = np.random.default_rng(7)
    for size, spread in ROWS:
        for shift in (0, -40, 300):
            row = (draws.normal(size=size) * spread + shift).astype(np.float32)
            seed, choice, position = int(draws.integers(2**63)), int(draws.integers(4)), int(draws.integers(9000))
            asked = Sampling(temperature=temperature, seed=seed)
            expected = sample(row, Context(asked, choice, 0, [0] * position))
            for isa in levels():
                found = library().oct_draw(isa, row.ctypes.data, size, temperature, seed, choice, position)
                assert found == expected, (size, spread, shift, Isa(isa).name)


@pytest.mark.parametrize("where", [0, 5, 96])
def test_a_draw_from_numbers_that_are_none_is_a_token(where: int) -> None:
    row = np.zeros(97, dtype=np.float32)
    row[where:] = np.nan
    for isa in levels():
        assert 0 <= library().oct_draw(isa, row.ctypes.data, 97, 0.7, 3, 0, 5) < 97


@pytest.mark.parametrize(
    "more",
    [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"bias": {1: 1.0}}, {"banned": ((1,),)}, {"repetition": 1.1}],
)
def test_whoever_asks_for_more_goes_to_the_sampler(more: dict[str, object]) -> None:
    assert only_warm(Sampling(temperature=0.5))
    assert not only_warm(Sampling(temperature=0.5, **more))  # type: ignore[arg-type]
    assert not only_warm(Sampling(temperature=0.0))
