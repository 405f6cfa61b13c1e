"""The CUDA executor with KV in fp8 (e4m3), on the emulator: tokens of the CPU executor whose KV is rounded to that."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.core.config.schema import Config, ExecutorConfig, ModelConfig
from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.cpu import llama
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cuda.attention import HeadAttention
from octavo.executors.cuda.emulated import again
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.graphs import Recorder
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.transformers.executor import TransformersExecutor
from octavo.kernels.attention import paged_attention
from octavo.plugins.memory.calculator import need
from octavo.plugins.memory.shape import read_shape
from tests.executors.driver import DECODE, Driver
from tests.kernels.conftest import Maker
from tests.kernels.test_executor import GREEDY, Bytes, Make, config, folder, make, prompt, replayed
from tests.speculation.replica import Replica, asked

__all__ = ["folder", "make"]


@pytest.fixture
def rounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CpuExecutor:
    """In fp32, but for what it reads of its KV."""
    executor = CpuExecutor.load(config(folder))

    def attended(queries: Tensor, pool: Tensor, *rest: object) -> Tensor:
        pool.copy_(pool.clamp(-448, 448).to(torch.float8_e4m3fn).float())
        return paged_attention(queries, pool, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(llama, "paged_attention", attended)
    return executor


@pytest.mark.parametrize(("order", "block_size", "mode", "recorder"), [(0, 16, "fast", again), (3, 32, "exact", None)])
def test_a_crowd_gives_the_tokens_of_rounded_kv(
    make: Make, rounded: CpuExecutor, order: int, block_size: int, mode: str, recorder: object
) -> None:
    """Chunks and decodes in one step, a warm start, a fork with a copied tail. A number of fp16 that falls to another
    side than fp32's is a step of fp8 away, so log-probabilities are near in the mean only."""
    apart: list[float] = []
    samplings = [GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=4, logprobs=3), GREEDY]
    prompts = [prompt(1, 40), prompt(2, 19), prompt(3, 5)]
    driver = Driver(make(order, mode, block_size, recorder=recorder, kv="fp8"), seed=order)
    live = [driver.open(ids, sampling=sampling) for ids, sampling in zip(prompts, samplings, strict=True)]
    for _ in range(6):
        driver.advance(live, chunk=17)
    warm = driver.open(prompts[0] + [9, 9], sampling=GREEDY, warm=live[0])
    child = driver.fork(live[1], 18, [7, 8], sampling=GREEDY)
    for _ in range(3):
        driver.advance([warm, child, live[0]])
    for sequence in (*live, warm, child):
        expected = replayed(rounded, sequence)
        assert sequence.ids == expected.ids
        for got, want in zip(sequence.logprobs, expected.logprobs, strict=True):
            assert got is not None
            assert want is not None
            apart.append(abs(got.logprob - want.logprob))
    print(np.mean(apart))
    assert np.mean(apart) < 0.08


def test_in_exact_mode_numbers_do_not_depend_on_company_chunks_or_blocks(make: Make) -> None:
    driver = Driver(make(1, "exact", kv="fp8"))
    crowd = [driver.open(prompt(i, n), sampling=GREEDY) for i, n in enumerate((50, 3, 18))]
    for _ in range(8):
        driver.advance(crowd, chunk=13)
    other = make(2, "exact", block_size=48, recorder=again, kv="fp8")
    for sequence in crowd:
        alone = replayed(other, sequence, chunk=7)
        assert alone.logprobs == sequence.logprobs


def test_blocks_go_to_host_memory_and_come_back(resident_kernels: Maker, folder: Path) -> None:
    """A pool in which sequences take turns, with places for what is evicted: nobody's answer changes."""
    requests = [asked(i, prompt(i, 25), tokens=24) for i in range(4)]

    def run(tokens: int, host_tokens: int) -> Replica:
        settings = config(folder, tokens=tokens, mode="exact", kv="fp8", host_tokens=host_tokens)
        replica = Replica(
            CudaExecutor.on(resident_kernels(0), settings, torch.float16, Bytes(), again), policy="off", slots=4
        )
        replica.run(requests)
        return replica

    roomy, tight = run(1024, 0), run(128, 512)
    assert tight.said == roomy.said
    assert tight.kv.pool.host is not None
    assert tight.kv.pool.host.swapped_out > 0


def test_half_the_bytes_and_keys_of_their_own(make: Make, folder: Path) -> None:
    """The sizes that a pool is made of, and what `octavo memory` says of the model."""
    plain, small = make().facts, make(kv="fp8").facts
    assert small.block_bytes * 2 == plain.block_bytes
    assert small.cache_seed != plain.cache_seed
    assert "KV fp8" in small.executor
    shape = read_shape(locate(str(folder)))
    assert need(shape, context=32, concurrency=1, dtype="fp8").kv == 2 * small.block_bytes


def test_what_it_loses_is_little_and_is_lost(make: Make, folder: Path) -> None:
    """KL from the fp32 model, in nats, of KV in 16 bits and in 8. Heads of random weights look at few keys, each of
    which counts: tests/quality has what is lost by a trained model."""
    exact = CpuExecutor.load(config(folder))
    sampling, ids = Sampling(temperature=0.0, prompt_logprobs=97), prompt(7, 60)

    def logits(executor: CpuExecutor | CudaExecutor) -> np.ndarray:
        driver = Driver(executor)
        sequence = driver.open(ids, sampling=sampling)
        rows = []
        while not sequence.output:
            driver.advance([sequence], chunk=40)
            assert driver.last is not None
            rows += [entry for chunk in driver.last.prompts for entry in chunk.entries]
        made = np.empty((len(rows), 97))
        for i, entry in enumerate(rows):
            made[i, entry.top_ids] = entry.top_logprobs
        return made

    reference = logits(exact)
    losses = {}
    for kv in ("auto", "fp8"):
        found = logits(make(kv=kv))
        losses[kv] = float((np.exp(reference) * (reference - found)).sum(-1).mean())
    print(losses)
    assert losses["auto"] < 0.05 * losses["fp8"]
    assert losses["fp8"] < 0.15


@pytest.mark.parametrize("kind", [NativeExecutor, CpuExecutor, TransformersExecutor])
def test_who_does_not_serve_it_says_so(kind: type[CpuExecutor], folder: Path) -> None:
    settings = Config(model=ModelConfig(path=str(folder)), executor=ExecutorConfig(kv="fp8"))
    with pytest.raises(ModelError, match=r'the executor [a-z]+ has no KV in fp8; set executor.kv to "fp32"'):
        kind.load(settings)


def test_what_kernels_cannot_do_is_said_at_load(make: Make) -> None:
    with pytest.raises(ModelError, match=r'the executor cuda has no KV in int8; .* "bf16" or "fp8"'):
        make(kv="int8")


@pytest.mark.parametrize("recorder", [None, again])
def test_numbers_that_fp8_has_no_room_for_are_counted(make: Make, recorder: Recorder | None) -> None:
    """One of each token's, in steps that are launched and in those that are replayed."""
    for kv in ("auto", "fp8"):
        executor = make(1, kv=kv, recorder=recorder)
        attention = executor.forward.decoder._layers[0].attention
        assert isinstance(attention, HeadAttention)
        with torch.inference_mode():
            assert attention.qkv.linear.bias is not None
            attention.qkv.linear.bias[-1] = 3000
        driver = Driver(executor)
        sequence = driver.open([5, 6, 7], sampling=GREEDY)
        driver.step((sequence, 3))
        assert executor.stats["kv_saturated"] == (3 if kv == "fp8" else 0)
        driver.step((sequence, DECODE))
        assert executor.stats["kv_saturated"] == (4 if kv == "fp8" else 0)
        driver.step((sequence, DECODE))
        assert executor.stats["kv_saturated"] == (5 if kv == "fp8" else 0)


def test_what_the_worst_step_writes_is_not_counted(folder: Path, resident_kernels: Maker, tmp_path: Path) -> None:
    """It is of a model whose every token saturates."""
    path = Path(shutil.copytree(folder, tmp_path / "great")) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.v_proj.bias"][-1] = 3000
    save_file(tensors, path, metadata={"format": "pt"})
    ran = Bytes(run=True)
    executor = CudaExecutor.on(resident_kernels(1), config(path.parent, kv="fp8"), torch.float16, ran)
    assert ran.ran == [True]
    driver = Driver(executor)
    driver.step((driver.open([5, 6, 7], sampling=GREEDY), 3))
    assert executor.stats["kv_saturated"] == 3


def test_numbers_that_are_not_finite_stay_so(make: Make) -> None:
    """An infinite value must not become the greatest of fp8: its sequence fails, as with KV in 16 bits."""
    for kv in ("auto", "fp8"):
        executor = make(1, kv=kv)
        attention = executor.forward.decoder._layers[0].attention
        assert isinstance(attention, HeadAttention)
        with torch.inference_mode():
            assert attention.qkv.linear.bias is not None
            attention.qkv.linear.bias[-1] = torch.inf
        driver = Driver(executor)
        sick = driver.open([5, 6, 7], sampling=GREEDY)
        driver.step((sick, 3))
        assert sick.failure is not None
        assert "not finite" in sick.failure
