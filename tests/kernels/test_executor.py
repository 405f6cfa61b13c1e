"""The CUDA executor's own code, with the emulator for a GPU, against the exact CPU executor."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool
from octavo.executors.cpu.probe import load_exact
from octavo.executors.cuda.executor import CudaExecutor, facts_for
from octavo.executors.loading.folder import load_folder
from octavo.kernels.cuda.device import DeviceError
from tests.executors.driver import DECODE, Driver
from tests.executors.tiny import VOCAB, save_tiny
from tests.kernels.conftest import Maker

GREEDY = Sampling(temperature=0.0, logprobs=3)
Make: TypeAlias = Callable[[int, int], Driver]
"""An order of execution, a block size."""


def config(folder: Path, block_size: int = 16, tokens: int = 1024) -> Config:
    return Config(
        model=ModelConfig(path=str(folder)),
        kv=KvConfig(block_size=block_size, tokens=tokens),
        executor=ExecutorConfig(threads=1),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads of 64 over one KV head."""
    made = tmp_path_factory.mktemp("models") / "tiny64"
    save_tiny(
        made,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=2,
        attention_bias=True,
    )
    return made


@pytest.fixture(scope="module")
def exact(folder: Path) -> CpuExecutor:
    model = load_folder(folder)
    facts, spec = facts_for(config(folder), "tiny64", model, torch.float16), model.spec
    with torch.inference_mode():
        pool = KvPool(PoolShape(facts.total_blocks, facts.block_size, spec.kv_heads, spec.head_dim), spec.layers)
        return CpuExecutor(load_exact(model), pool, facts)


@pytest.fixture
def make(folder: Path, kernels: Maker) -> Make:
    """In fp16: its 11 bits leave greedy tokens of so small a model alone."""

    def made(order: int, block_size: int) -> Driver:
        model = load_folder(folder)
        facts = facts_for(config(folder, block_size), "tiny64", model, torch.float16)
        return Driver(CudaExecutor(model, kernels(order), facts, torch.float16), seed=order)

    return made


def prompt(seed: int, n: int) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(VOCAB) for i in range(n)]


@pytest.mark.parametrize(("order", "block_size"), [(0, 16), (1, 32), (2, 16), (3, 48)])
def test_a_crowd_gives_the_tokens_of_the_exact_executor(
    make: Make, exact: CpuExecutor, order: int, block_size: int
) -> None:
    """Chunks and decodes in one step, a warm start, a fork with a copied tail; greedy, seeded, restricted."""
    samplings = [
        GREEDY,
        Sampling(temperature=0.8, top_p=0.9, seed=4, logprobs=3),
        Sampling(temperature=1.0, top_k=8, repetition=1.2, frequency=0.2, seed=5, logprobs=3),
        Sampling(temperature=0.7, seed=6, logprobs=3, allowed=(3, 4, 5, 6, 40), banned=((4,), (6, 5)), bias={40: -2.5}),
        Sampling(temperature=0.0, logprobs=3, presence=0.1, min_tokens=3, ends=tuple(range(1, 90)), bias={9: 1.0}),
    ]
    prompts = [prompt(1, 40), prompt(2, 19), prompt(3, 3), prompt(4, 5), prompt(5, 8)]
    driver = make(order, block_size)
    live = [driver.open(ids, sampling=sampling) for ids, sampling in zip(prompts, samplings, strict=True)]
    for _ in range(6):
        driver.advance(live, chunk=17)
    warm = driver.open(prompts[0] + [9, 9], sampling=GREEDY, warm=live[0])
    child = driver.fork(live[1], 18, [7, 8], sampling=GREEDY)
    for _ in range(3):
        driver.advance([warm, child, live[0]])
    for sequence in (*live, warm, child):
        assert sequence.failure is None
        alone = Driver(exact)
        expected = alone.open(
            sequence.ids[: len(sequence.ids) - len(sequence.logprobs)],
            prompt_len=sequence.prompt_len,
            sampling=sequence.sampling,
        )
        while len(expected.logprobs) < len(sequence.logprobs):
            alone.advance([expected])
        assert sequence.ids == expected.ids
        for got, want in zip(sequence.logprobs, expected.logprobs, strict=True):
            assert got is not None
            assert want is not None
            assert got.token == want.token
            assert got.top_logprobs == pytest.approx(want.top_logprobs, abs=0.05)


def test_a_sequence_that_cannot_be_computed_fails_alone(make: Make) -> None:
    driver = make(0, 16)
    good, sick = driver.open([5, 6, 7], sampling=GREEDY), driver.open([1, VOCAB, 3], sampling=GREEDY)
    driver.step((good, 3), (sick, 3))
    assert good.failure is None
    assert sick.failure is not None
    assert "vocabulary" in sick.failure
    sick.ids.append(0)
    driver.step((good, DECODE), (sick, DECODE))
    assert driver.last is not None
    assert [failed.open_id for failed in driver.last.failed] == [sick.open_id]
    assert len(good.output) == 2


def test_numbers_that_are_not_finite_fail_their_sequence(folder: Path, kernels: Maker) -> None:
    model = load_folder(folder)
    model.weights["embed"][40] = torch.inf
    executor = CudaExecutor(model, kernels(1), facts_for(config(folder), "x", model, torch.float16), torch.float16)
    driver = Driver(executor)
    good, sick = driver.open([5, 6, 7], sampling=GREEDY), driver.open([1, 40, 3], sampling=GREEDY)
    driver.step((good, 3), (sick, 3))
    assert sick.failure is not None
    assert "not finite" in sick.failure
    assert len(good.output) == 1


@pytest.mark.parametrize(("block_size", "tokens", "word"), [(24, 1024, "block_size is 24"), (16, 8, "holds no block")])
def test_what_kernels_cannot_do_is_said_at_load(folder: Path, block_size: int, tokens: int, word: str) -> None:
    with pytest.raises(ModelError, match=word):
        facts_for(config(folder, block_size, tokens), "tiny64", load_folder(folder), torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_loading_says_so(folder: Path) -> None:
    with pytest.raises(DeviceError, match="finds no GPU"):
        CudaExecutor.load(config(folder))
