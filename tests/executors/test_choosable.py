"""What may be chosen: bias, bans and the end that may not come yet, for one row and over a sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.messages import Sampling, TokenLogprob
from octavo.executors.sampling import Context, logprob, restrict, sample, shaped
from tests.executors.conftest import Maker
from tests.executors.driver import Driver

ROW = np.array([1.0, 4.0, 3.0, 2.0], dtype=np.float32)


def chosen(sampling: Sampling, ids: list[int] | None = None, prompt_len: int = 0) -> int:
    return sample(ROW, Context(sampling, 0, prompt_len, ids or []))


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_each_rule_by_itself(temperature: float) -> None:
    assert chosen(Sampling(temperature=temperature)) == 1
    assert chosen(Sampling(temperature=temperature, bias={3: 100.0})) == 3
    assert chosen(Sampling(temperature=temperature, bias={1: -100.0})) == 2
    assert chosen(Sampling(temperature=temperature, allowed=(0, 3))) == 3
    assert chosen(Sampling(temperature=temperature, banned=((1,),))) == 2
    held = Sampling(temperature=temperature, banned=((7, 8, 1),))
    assert [chosen(held, ids) for ids in ([7, 8], [8], [7, 8, 9])] == [2, 1, 1]
    late = Sampling(temperature=temperature, min_tokens=2, ends=(1,))
    assert [chosen(late, [5] * n, prompt_len=3) for n in (3, 4, 5)] == [2, 2, 1]


def test_a_ban_that_leaves_nothing_is_not_applied() -> None:
    assert chosen(Sampling(temperature=0.0, allowed=(3,), banned=((3,),))) == 3
    assert chosen(Sampling(temperature=0.0, allowed=(0, 3), banned=((3,),))) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 19)),
    st.sets(st.integers(0, 19), max_size=19),
    st.dictionaries(st.integers(0, 19), st.floats(-100, 100), max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1e-30, 0.7, 2.0]),
)
def test_no_draw_is_ever_of_a_banned_id(
    allowed: set[int], banned: set[int], bias: dict[int, float], seed: int, temperature: float
) -> None:
    row = np.random.default_rng(seed).normal(size=20).astype(np.float32)
    sampling = Sampling(
        temperature=temperature,
        seed=seed,
        bias=bias,
        allowed=tuple(allowed),
        banned=tuple((token,) for token in banned),
        top_p=0.9,
        top_k=5,
    )
    token = sample(row, Context(sampling, 0, 0, []))
    assert not allowed or token in allowed
    left = (allowed or set(range(20))) - banned
    assert not left or token in left


def test_what_is_shaped_and_what_is_not() -> None:
    assert not shaped(Sampling(temperature=0.3, top_k=3, seed=9, logprobs=2, prompt_logprobs=2))
    for sampling in (
        Sampling(bias={1: 0.5}),
        Sampling(allowed=(1,)),
        Sampling(banned=((1,),)),
        Sampling(min_tokens=1, ends=(2,)),
        Sampling(presence=1.0),
    ):
        assert shaped(sampling)


def test_the_models_own_numbers_stay_finite() -> None:
    scores = restrict(ROW.astype(np.float64), Context(Sampling(allowed=(2,)), 0, 0, []))
    assert np.isneginf(scores[0])
    assert logprob(ROW, 0, 4).logprob > -10


def test_prompt_logprobs_do_not_depend_on_how_the_prompt_was_cut(tiny: Maker) -> None:
    """To the last bit; and a sampled token's own entry is what the prompt's would be if it were one."""
    ids = [(7 * i * i + 3) % 97 for i in range(60)]
    asks = Sampling(temperature=0.0, prompt_logprobs=3, logprobs=3)

    def entries(*chunks: int) -> list[TokenLogprob]:
        driver = Driver(tiny())
        sequence = driver.open(ids, sampling=asks)
        company = driver.open(ids[:30])
        found: list[TokenLogprob] = []
        for i, n in enumerate(chunks):
            result = driver.step((sequence, n), *([(company, 30)] if i == 0 else []))
            for chunk in result.prompts:
                assert chunk.open_id == sequence.open_id
                assert chunk.start == len(found) + 1
                found += chunk.entries
        return found

    whole = entries(60)
    assert [entry.token for entry in whole] == ids[1:]
    assert entries(7, 50, 3) == entries(59, 1) == whole
    driver = Driver(tiny())
    shorter = driver.open(ids[:-1], sampling=asks)
    driver.step((shorter, 59))
    (first,) = shorter.logprobs
    assert first is not None
    assert (first.top_ids, first.top_logprobs) == (whole[-1].top_ids, whole[-1].top_logprobs)
