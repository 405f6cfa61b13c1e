"""Kernels that work on rows: norm, activation, and sampling against the executors' own sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.messages import Sampling
from octavo.executors.sampling import Context, penalise, restrict
from octavo.executors.sampling import sample as expected_token
from octavo.kernels.cuda import reference
from octavo.kernels.cuda.draws import IN_PROMPT, Draws, draws
from octavo.kernels.cuda.instances import ACTIVATIONS
from octavo.kernels.cuda.launch import Kernels
from tests.kernels.conftest import Maker

TYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_add_rmsnorm(kernels: Maker, dtype: torch.dtype, order: int) -> None:
    norm(kernels(order), dtype, 1.0)


def norm(kernels: Kernels, dtype: torch.dtype, size: float) -> None:
    x, residual, weight = (torch.randn(3, 1096).to(dtype) for _ in range(3))
    x, residual = x * size, residual * size
    summed = (x.float() + residual.float()).to(dtype)
    out = kernels.add_rmsnorm(x, residual, weight[0], 1e-5)
    assert torch.equal(residual, summed)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), reference.rmsnorm(summed, weight[0], 1e-5), rtol=eps, atol=1e-6)
    alone = kernels.add_rmsnorm(x, None, weight[0], 1e-5)
    torch.testing.assert_close(alone.float(), reference.rmsnorm(x, weight[0], 1e-5), rtol=eps, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES)
def test_gate_mul(kernels: Maker, dtype: torch.dtype, activation: str) -> None:
    gate_up = (torch.randn(5, 208) * 4).to(dtype)
    got, want = kernels(0).gate_mul(gate_up, activation), reference.gate_mul(gate_up, activation)
    torch.testing.assert_close(got.double(), want, rtol=max(2 * torch.finfo(dtype).eps, 1e-5), atol=1e-7)


VOCABULARY = 333
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_k=1, seed=2),
    Sampling(temperature=1.3, top_k=20, seed=-3),
    Sampling(temperature=1.0, top_p=0.5, seed=2**63 - 1),
    Sampling(temperature=2.0, top_p=0.95, seed=5),
    Sampling(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02, seed=6),
    Sampling(temperature=1.0, min_p=0.3, seed=7),
    Sampling(temperature=1e-9, seed=8),
    Sampling(temperature=0.0, repetition=1.5, presence=0.3, frequency=0.4),
    Sampling(temperature=0.0, presence=-0.5),
    Sampling(temperature=0.9, repetition=1.2, presence=-0.5, frequency=0.1, top_p=0.9, seed=9),
    Sampling(temperature=1.0, typical_p=0.3, seed=10),
    Sampling(temperature=1.8, typical_p=0.95, seed=11),
    Sampling(temperature=1.2, top_k=60, top_p=0.95, min_p=0.01, typical_p=0.5, seed=12),
]
IDS = [5, 7, 7, 11, 3, 3, 3, 20]
PROMPT = 4


def packed(choice: int) -> tuple[Draws, Tensor]:
    """The draws of SAMPLINGS for a sequence IDS, and its counts."""
    rows = draws(len(SAMPLINGS))
    for i, sampling in enumerate(SAMPLINGS):
        for name in ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency", "top_k"):
            rows[name][i] = getattr(sampling, name)
        rows["seed"][i] = sampling.seed & 0xFFFFFFFFFFFFFFFF
    rows["choice"], rows["position"], rows["counts"] = choice, len(IDS), 0
    counts = torch.zeros(1, VOCABULARY, dtype=torch.int32)
    for i, token in enumerate(IDS):
        counts[0, token] = counts[0, token] | IN_PROMPT if i < PROMPT else counts[0, token] + 1
    return rows, counts


KINDS = ("smooth", "ties", "seen")


def rows_of(kind: str, seed: int) -> Tensor:
    """Logits: smooth, so coarse that most tokens tie with others, or such that what was seen is likely."""
    made = torch.randn(len(SAMPLINGS), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "seen":
        made[:, IDS] = made[:, IDS] / 20 + 10
    return made.round().to(torch.bfloat16) if kind == "ties" else made


def drawn_by(kernels: Kernels, rows: Tensor, drawn: Draws, **how: Any) -> Tensor:
    return kernels.sample(kernels.scores(rows, drawn, **how), drawn)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_executors_sampler(kernels: Maker, kind: str, order: int) -> None:
    """Seeds, choices and positions included: the device draws what the CPU draws."""
    for seed in range(4):
        rows = rows_of(kind, seed)
        drawn, counts = packed(choice=seed)
        tokens = drawn_by(kernels(order), rows, drawn, counts=counts)
        expected = [
            expected_token(row, Context(sampling, seed, PROMPT, IDS))
            for row, sampling in zip(rows.float().numpy(), SAMPLINGS, strict=True)
        ]
        assert tokens.tolist() == expected


def test_masks_and_bias(kernels: Maker) -> None:
    rows = rows_of("smooth", 9)
    drawn, _ = packed(0)
    drawn["counts"], drawn["allowed"] = -1, 0
    allowed = torch.zeros(-(-VOCABULARY // 32) * 32, dtype=torch.bool)
    allowed[[40, 90, 200, 332]] = True
    bits = np.packbits(allowed.numpy(), bitorder="little").view(np.int32)
    mask = torch.from_numpy(bits.copy()).view(1, -1)
    tokens = drawn_by(kernels(1), rows, drawn, allowed=mask)
    assert set(tokens.tolist()) <= {40, 90, 200, 332}
    drawn["bias"][:], drawn["bias_end"][:] = 0, 2
    bias = (torch.tensor([41, 90], dtype=torch.int32), torch.tensor([1000.0, 500.0], dtype=torch.float64))
    assert drawn_by(kernels(1), rows, drawn, allowed=mask, bias=bias).tolist() == [90] * len(rows)
    drawn["allowed"] = -1
    assert drawn_by(kernels(1), rows, drawn, bias=bias).tolist() == [41] * len(rows)


def test_a_row_that_is_not_finite_gives_no_token(kernels: Maker) -> None:
    rows = rows_of("smooth", 2)[:4].clone()
    rows[0, 5], rows[1, 6], rows[2] = torch.nan, torch.inf, -torch.inf
    drawn = draws(4)
    drawn["temperature"] = [0, 1, 0, 0]
    assert drawn_by(kernels(0), rows, drawn).tolist() == [-1, -1, -1, int(rows[3].argmax())]


def test_scores(kernels: Maker) -> None:
    for order in (0, 1):
        scores(kernels(order))


def scores(kernels: Kernels) -> None:
    """Penalties, bias and masks of several rows, each with a table of its own, as the executors' sampler has them."""
    samplings = [
        Sampling(repetition=1.5),
        Sampling(presence=0.5, frequency=0.25),
        Sampling(bias={7: 3.0, 50: -2.0}, repetition=1.25),
        Sampling(bias={4: 9.0, 5: 1.0}, allowed=(3, 5, 64, 332)),
        Sampling(allowed=(4, 33, 200)),
    ]
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(len(samplings), VOCABULARY + 3, generator=generator) * 3)[:, :VOCABULARY]
    sequences = [[5, 7, 7, 11, 3, 3, 20 + i, i] for i in range(len(samplings))]
    drawn = draws(len(samplings))
    counts = torch.zeros(len(samplings), VOCABULARY, dtype=torch.int32)
    masks = torch.zeros(2, -(-VOCABULARY // 32) * 32, dtype=torch.bool)
    ids: list[int] = []
    values: list[float] = []
    expected = []
    for i, (sampling, sequence) in enumerate(zip(samplings, sequences, strict=True)):
        for name in ("repetition", "presence", "frequency"):
            drawn[name][i] = getattr(sampling, name)
        drawn["counts"][i] = i if i < 3 else -1
        for at, token in enumerate(sequence):
            counts[i, token] = counts[i, token] | IN_PROMPT if at < PROMPT else counts[i, token] + 1
        if sampling.allowed:
            drawn["allowed"][i] = i - 3
            masks[i - 3, list(sampling.allowed)] = True
        drawn["bias"][i] = len(ids)
        ids += sampling.bias.keys()
        values += sampling.bias.values()
        drawn["bias_end"][i] = len(ids)
        context = Context(sampling, 0, PROMPT, sequence)
        expected.append(torch.from_numpy(restrict(penalise(rows[i].double().numpy().copy(), context), context)))
    got = kernels.scores(
        rows,
        drawn,
        counts=counts,
        allowed=torch.from_numpy(np.packbits(masks.numpy(), axis=1, bitorder="little").view(np.int32).copy()),
        bias=(torch.tensor(ids, dtype=torch.int32), torch.tensor(values, dtype=torch.float64)),
    )
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-15, atol=0)
