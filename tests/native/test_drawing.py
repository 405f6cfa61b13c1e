"""Draws and log-probabilities of the library are the sampler's, at every level that this processor has."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.messages import Sampling
from octavo.executors.native.drawing import Drawing, Draws, Reported
from octavo.executors.native.library import Floats, Isa
from octavo.executors.residents import Resident
from octavo.executors.sampling import Context, keep, logprob, sample
from tests.native.net import levels, library

ROWS = [(97, 1.0), (64, 3.0), (1000, 0.0), (4099, 10.0), (49152, 3.0)]
"""Ids, and how far their logits are spread: 0 are equal ones, which only noise tells apart."""
OPTIONS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 40}, {"top_k": 3000}, {"top_p": 0.9}, {"top_p": 0.0}, {"top_p": 0.999999}, {"min_p": 0.1},
    {"min_p": 1.0}, {"top_k": 20, "top_p": 0.5}, {"top_p": 0.95, "min_p": 0.02}, {"top_k": 7, "min_p": 0.3},
    {"repetition": 1.3, "top_p": 0.8}, {"repetition": 0.7, "presence": 0.4, "frequency": -0.2},
    {"frequency": 0.9, "top_k": 5}, {"bias": {3: 4.5, 9: -100.0, 60: 2.0}, "top_p": 0.9}, {"allowed": (5, 2, 2, 60)},
    {"allowed": (5, 2, 33), "bias": {33: 1.0}, "banned": ((2,),), "top_k": 2}, {"banned": ((4,), (1, 2), (7, 9, 5))},
    {"typical_p": 0.2}, {"typical_p": 0.95}, {"typical_p": 0.999999}, {"top_k": 50, "typical_p": 0.6},
    {"top_p": 0.9, "min_p": 0.01, "typical_p": 0.5}, {"min_p": 0.02, "typical_p": 0.9},
    {"repetition": 1.3, "bias": {3: 4.5}, "typical_p": 0.7}, {"allowed": (5, 2, 33, 40), "typical_p": 0.5},
    {"min_tokens": 9, "ends": (0, 1, 40), "top_p": 0.7}, {"allowed": (8,), "banned": ((8,),)},
]  # fmt: skip


class Bare:
    """A vocabulary in place of a model: the library draws on this thread."""

    def __init__(self, vocabulary: int, isa: Isa) -> None:
        self.weights, self.spec, self.vocab_size, self.isa = self, self, vocabulary, isa

    def rows(self, function: str, table: npt.NDArray[np.void]) -> None:
        getattr(library(), function)(None, self.isa, self.vocab_size, table.ctypes.data, len(table))


def drawing(vocabulary: int, isa: Isa) -> Drawing:
    return Drawing(Bare(vocabulary, isa))  # type: ignore[arg-type]


def agree(
    row: Floats, sampling: Sampling, ids: list[int], prompt: int, mask: npt.NDArray[np.bool_] | None = None
) -> None:
    context = Context(sampling, 1, prompt, ids, mask)
    expected = sample(row, context)
    for isa in levels():
        ours = drawing(len(row), isa)
        assert ours.sample(row, context) == expected, (sampling, Isa(isa).name)
        if mask is None:
            resident = Resident(1, ids, prompt, 1, sampling)
            assert ours.draw([Draws(resident, row[None]), Draws(resident, row[None])]) == [[expected], [expected]]


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 0.7, 1.0, 2.0, 50.0])
def test_a_draw_is_the_samplers(temperature: float) -> None:
    draws = np.random.default_rng(7)
    for size, spread in ROWS:
        for shift in (0, -40, 300):
            row = (draws.normal(size=size) * spread + shift).astype(np.float32)
            asked = Sampling(temperature=temperature, seed=int(draws.integers(2**63)))
            agree(row, asked, [0] * int(draws.integers(900)), 0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
def test_what_else_is_asked_changes_the_same(options: dict[str, Any], temperature: float) -> None:
    draws = np.random.default_rng(3)
    for size, spread in ROWS:
        for _ in range(4):
            row = (draws.normal(size=size) * spread).astype(np.float32)
            if draws.random() < 0.5:  # many ties
                row = np.round(row)
            ids = [*draws.integers(0, 64, size=int(draws.integers(1, 60))).tolist(), 1]
            sampling = Sampling(temperature=temperature, seed=int(draws.integers(2**63)), **options)
            agree(row, sampling, ids, min(4, len(ids)))
            mask = draws.random(size) < 0.4
            mask[[*sampling.allowed, 2]] = True
            agree(row, sampling, ids, min(4, len(ids)), mask)


_ROW = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0, 2.25, 1e-30]), min_size=1, max_size=300)


@settings(max_examples=300, deadline=None)
@given(
    _ROW,
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0, 1e7]),
        top_k=st.integers(0, 50),
        top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
        typical_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
        repetition=st.sampled_from([0.8, 1.0, 1.3]),
        presence=st.sampled_from([0.0, 0.5]),
        frequency=st.sampled_from([-0.5, 0.0, 0.5]),
        seed=st.integers(0, 2**63 - 1),
    ),
    st.data(),
)
def test_any_options_on_any_row(values: list[float], sampling: Sampling, data: st.DataObject) -> None:
    """Weights that repeat may reach p (of top-p or typical) within float64's last bit: in each order of sums another
    id is the last one. So the library's token may be another only if it is kept when p is that little more."""
    row = np.array(values, dtype=np.float32)
    ids = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=8))
    context = Context(sampling, 0, min(2, len(ids)), ids)
    near = {
        sample(row, context._replace(sampling=_times(sampling, top_p, typical_p)))
        for top_p, typical_p in itertools.product((1 - 1e-13, 1, 1 + 1e-13), repeat=2)
    }
    for isa in levels():
        assert drawing(len(row), isa).sample(row, context) in near


def _times(sampling: Sampling, top_p: float, typical_p: float) -> Sampling:
    return msgspec.structs.replace(
        sampling, top_p=min(sampling.top_p * top_p, 1.0), typical_p=min(sampling.typical_p * typical_p, 1.0)
    )


def test_guesses_are_context_for_what_comes_after_them() -> None:
    draws = np.random.default_rng(5)
    logits = draws.normal(size=(4, 500)).astype(np.float32)
    options = {"repetition": 1.8, "frequency": 0.7, "banned": ((7,), (8, 9)), "min_tokens": 4, "ends": (2,)}
    sampling = Sampling(temperature=0.8, seed=11, top_p=0.9, **options)  # type: ignore[arg-type]
    resident = Resident(1, [3, 5, 7, 7], 2, 0, sampling)
    guesses = (8, 9, 7)
    ours = drawing(500, levels()[-1])
    for _ in range(40):  # it grows: what is kept of it follows
        found = ours.draw([Draws(resident, logits, guesses)])[0]
        after = [[*resident.tokens, *guesses[:i]] for i in range(4)]
        assert found == [sample(row, Context(sampling, 0, 2, ids)) for row, ids in zip(logits, after, strict=True)]
        resident.tokens.append(found[0])
        logits = draws.normal(size=(4, 500)).astype(np.float32)


@pytest.mark.parametrize("alternatives", [0, 1, 20, 3000])
def test_log_probabilities_are_the_samplers(alternatives: int) -> None:
    draws = np.random.default_rng(9)
    for size, spread in [*ROWS, (300, 9000.0)]:
        row = (draws.normal(size=size) * spread).astype(np.float32)
        row[5] = row[17]
        token = int(draws.integers(size))
        expected = logprob(row, token, alternatives)
        for isa in levels():
            found = drawing(size, isa).likely([Reported(row, token, alternatives), Reported(row, 0, 2)])[0]
            assert (found.token, found.top_ids) == (token, expected.top_ids)
            assert found.logprob == pytest.approx(expected.logprob, rel=1e-12, abs=1e-12)
            assert found.top_logprobs == pytest.approx(expected.top_logprobs, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"typical_p": 0.5}, {"top_k": 9, "top_p": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("where", [0, 5, 96])
def test_a_draw_from_numbers_that_are_none_is_a_token(where: int, options: dict[str, Any]) -> None:
    row = np.zeros(97, dtype=np.float32)
    row[where:] = np.nan
    for isa in levels():
        sampling = Sampling(temperature=0.7, seed=3, **options)
        assert 0 <= drawing(97, isa).sample(row, Context(sampling, 0, 5, [0] * 5)) < 97


def test_what_is_kept_is_what_transformers_keeps() -> None:
    """Its processors, one by one: penalty, temperature, top-k, top-p, min-p, typical. Its top-p keeps ids whose
    likelier ones have less than p together, as ours; a nucleus that ends between equal ids is a matter of order, and
    left out."""
    from transformers.generation import logits_process as theirs

    draws = np.random.default_rng(2)
    for trial in range(60):
        row = (draws.normal(size=int(draws.integers(50, 3000))) * 3).astype(np.float32)
        ids = draws.integers(0, 50, size=12).tolist()
        scores = theirs.RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([ids]), torch.from_numpy(row)[None].clone())
        scores = theirs.TemperatureLogitsWarper(0.7)(torch.tensor([ids]), scores)
        kinds: list[dict[str, Any]] = [{"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.8}]
        options = kinds[trial % 4]
        warpers: list[Any] = [
            theirs.TopKLogitsWarper, theirs.TopPLogitsWarper, theirs.MinPLogitsWarper, theirs.TypicalLogitsWarper,
        ]  # fmt: skip
        warper = warpers[trial % 4]
        kept = torch.isfinite(warper(next(iter(options.values())))(torch.tensor([ids]), scores)[0]).numpy()
        exact = scores[0].double().numpy()
        sampling = Sampling(temperature=0.7, repetition=1.2, **options)
        assert np.array_equal(keep(exact - exact.max(), sampling), np.flatnonzero(kept))
        for seed in range(20):
            context = Context(Sampling(temperature=0.7, repetition=1.2, seed=seed, **options), 0, 12, ids)
            assert kept[drawing(len(row), levels()[-1]).sample(row, context)]


def test_alternatives_that_differ_by_less_than_their_log_probabilities_tell() -> None:
    row = np.linspace(0, 1e-18, 1000).astype(np.float32)
    for isa in levels():
        assert drawing(1000, isa).likely([Reported(row, 0, 3)])[0].top_ids == logprob(row, 0, 3).top_ids == [0, 1, 2]
