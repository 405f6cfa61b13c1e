"""Whole models: numbers against transformers' and torch's, and the same tokens under any schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.messages import Sampling, TokenLogprob
from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import GgufFile
from octavo.core.models.locate import locate
from octavo.executors.cpu.layout import PoolShape, Span
from octavo.executors.cpu.linear import Backend, RowCounts
from octavo.executors.cpu.llama import Arithmetic, KvPool, Llama
from octavo.executors.loading.checkpoint import Checkpoint
from octavo.executors.loading.files import open_checkpoint, plain
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.loading.from_gguf import from_gguf
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.library import Floats, Kind
from octavo.executors.native.program import Native, Pool
from tests.executors.driver import DECODE, Driver, Sequence
from tests.executors.test_loading import IDS, VARIANTS, reference, write_gguf
from tests.executors.tiny import save_tiny
from tests.native.net import logits_of, make, step

Maker: TypeAlias = Callable[..., NativeExecutor]


def agreement(logits: Floats, expected: Floats) -> tuple[float, float]:
    """Mean KL from `expected`'s distributions, and how often the best token is the same."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (expected, logits))
    return float((p.exp() * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).double().mean())


@pytest.mark.parametrize("name", VARIANTS)
def test_exact_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = reference(save_tiny(tmp_path, **VARIANTS[name])).numpy()
    found = [
        logits_of(make(from_folder(tmp_path), exact=True, blocks=160, block_size=size), IDS, chunk)
        for size, chunk in ((16, 1000), (1, 60), (3, 7))
    ]
    np.testing.assert_allclose(found[0], expected, atol=1e-4, rtol=0)
    assert np.array_equal(found[1], found[0])
    assert np.array_equal(found[2], found[0])


def test_a_folder_of_16_bit_floats_stays_16_bit_and_exact(tmp_path: Path) -> None:
    for dtype, kind in ((torch.bfloat16, Kind.BF16), (torch.float16, Kind.F16), (torch.float32, Kind.F32)):
        model = save_tiny(tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        model.save_pretrained(tmp_path)
        native = make(from_folder(tmp_path), exact=True)
        assert {Kind(matrix.kind) for matrix in native.weights.matrices.values()} == {kind}
        np.testing.assert_allclose(logits_of(native, IDS), reference(model).numpy(), atol=1e-4, rtol=0)


def test_a_quantised_file_is_what_it_says(tmp_path: Path) -> None:
    """Q8_0 weights, computed exactly, give the logits of the numbers they stand for; int8 activations come near."""
    changes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    write_gguf(tmp_path / "m.gguf", save_tiny(tmp_path, **changes))
    checkpoint, expected = from_gguf(tmp_path / "m.gguf"), torch_logits(tmp_path / "m.gguf", IDS)
    exact = make(checkpoint, exact=True)
    assert {Kind(matrix.kind) for matrix in exact.weights.matrices.values()} == {Kind.W8}
    np.testing.assert_allclose(logits_of(exact, IDS), expected, atol=1e-4, rtol=0)
    kl, _ = agreement(logits_of(make(checkpoint, exact=False), IDS), expected)
    assert 0 < kl < 0.01


def torch_logits(path: Path, ids: list[int]) -> Floats:
    """Of the dequantised weights, by the torch executor's model."""
    with torch.inference_mode():
        llama = Llama(plain(from_gguf(path)), Arithmetic(Backend.PLAIN, RowCounts((32,)), RowCounts((32,)), (16,)))
        shape = PoolShape(len(ids), 1, llama.spec.kv_heads, llama.spec.head_dim)
        spans = [Span(ids, 0, list(range(len(ids))))]
        layout = llama.layout(spans, shape)
        logits: Floats = llama.logits(llama.hidden(layout, KvPool(shape, llama.spec.layers))).numpy()
    return logits


@pytest.fixture(scope="module")
def default() -> Checkpoint:
    return open_checkpoint(locate("default"))


TEXT = (
    "The sky is blue because molecules of the air scatter short waves of light more than long ones. A fox who "
    "wanted to know asked the owl, and the owl, who liked to be asked, said: when the sun is high, its light "
    "comes straight down to us, and what is left of it looks yellow; but all the rest of the sky sends us "
    "what was scattered. In the evening the way is longer. def area(radius):\n    return 3.14159 * radius ** "
    "2\n\nfor i in range(10):\n    print(i, area(i))\n\nPermission is hereby granted, free of charge, to any "
    "person obtaining a copy of this software and associated documentation files, to deal in the software "
    "without restriction, including without limitation the rights to use, copy, modify, merge, publish, "
    "distribute, sublicense, and sell copies of the software. Paris is the capital of France, Rome that of "
    "Italy, and Madrid that of Spain. Water boils at one hundred degrees, and it freezes at zero. Once upon a "
    "time there was a small girl who lived in a house at the edge of a big dark forest. Every morning she "
    "went to the well to fetch water, and every morning a crow sat there and watched her. "
)


def encode(text: str) -> list[int]:
    """Words to ids by longest match; any split will do here, as long as it is the language's."""
    files = locate("default")
    assert files.path is not None
    ids = {token: i for i, token in enumerate(GgufFile(files.path).metadata["tokenizer.ggml.tokens"])}
    text, out = text.replace(" ", "Ġ").replace("\n", "Ċ"), []
    while text:
        n = next(n for n in range(min(len(text), 20), 0, -1) if text[:n] in ids)
        out.append(ids[text[:n]])
        text = text[n:]
    return out


def test_the_default_model(default: Checkpoint) -> None:
    """Exact mode gives torch's fp32 logits; fast mode stays near them, and gives the same bits in any chunks."""
    ids = encode(TEXT)[:300]
    assert len(ids) > 200
    files = locate("default")
    assert files.path is not None
    expected = torch_logits(Path(files.path), ids)
    exact = logits_of(make(default, exact=True), ids)
    kl, top = agreement(exact, expected)
    print(f"exact: largest difference {np.abs(exact - expected).max():.2e}, KL {kl:.1e}, top-1 {top:.3f}")
    assert np.abs(exact - expected).max() < 2e-3
    assert kl < 1e-8
    fast = make(default, exact=False)
    whole = logits_of(fast, ids)
    kl, top = agreement(whole, expected)
    print(f"fast: KL {kl:.5f}, top-1 {top:.3f}")
    assert kl < 0.01
    assert top > 0.9
    assert np.array_equal(logits_of(fast, ids[:70], 9), whole[:70])
    together = step(fast, [(ids[:5], 0, [1]), (ids[:40], 0, [2, 3, 4]), (ids[:1], 0, [5])])[0]
    assert np.array_equal(together, np.concatenate([whole[:5], whole[:40], whole[:1]]))


# ── the executor ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=["exact", "fast"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """block_size, tokens, threads → an executor with an empty pool, of Q8_0 weights."""
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    changes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    write_gguf(path, save_tiny(path.parent, **changes))
    config = Config(
        model=ModelConfig(path=str(path)),
        kv=KvConfig(tokens=64),
        executor=ExecutorConfig(mode=request.param, threads=1),
    )
    loaded = NativeExecutor.load(config)

    def build(block_size: int = 16, tokens: int = 2048, threads: int = 2) -> NativeExecutor:
        blocks = tokens // block_size
        facts = msgspec.structs.replace(loaded.facts, block_size=block_size, total_blocks=blocks)
        pool = Pool(blocks, block_size, loaded.model.pool.kind)
        return NativeExecutor(Native(loaded.model.weights, pool, threads), facts)

    return build


def bits(entries: list[TokenLogprob | None]) -> list[tuple[int, float, list[int], list[float]]]:
    """Log-probabilities are a window on the logits: equal ones to the last bit mean equal logits."""
    return [(e.token, e.logprob, e.top_ids, e.top_logprobs) for e in entries if e is not None]


def prompt(seed: int, n: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(97) for i in range(n)]


NEW = 4


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_gives_what_a_sequence_gives_alone(tiny: Maker, seed: int) -> None:
    """Random chunks, mixes, block sizes, threads, preemptions and warm starts; some sampled, with log-probabilities."""
    draw = random.Random(seed)
    driver = Driver(tiny(draw.choice([1, 3, 16]), 4096, draw.choice([1, 2, 4])), seed)
    lengths = [draw.choice([1, 2, 17, 40, 70, 150]) for _ in range(draw.randint(1, 6))]
    samplings = [
        Sampling(temperature=0.8 * (i % 2), seed=i, top_k=20 * (i % 3), logprobs=3 if i % 4 < 3 else -1)
        for i in range(len(lengths))
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
        alone = Driver(tiny(threads=1))
        expected = alone.open(prompts[i], sampling=samplings[i])
        alone.finish(expected, NEW)
        assert sequence.output == expected.output
        assert bits(produced[i] + sequence.logprobs) == bits(expected.logprobs)


def _piece(sequence: Sequence, n: int) -> tuple[Sequence, int]:
    if sequence.left == 1 and sequence.output and n % 2:
        return sequence, DECODE
    return sequence, min(n, sequence.left)


def test_a_fork_goes_on_as_its_parent_would(tiny: Maker) -> None:
    ids = prompt(4, 37)
    driver = Driver(tiny(block_size=8))
    parent = driver.open(ids)
    driver.step((parent, 37))
    twin = driver.fork(parent, 30, ids[30:])
    driver.step((parent, DECODE), (twin, 7))
    while live := [s for s in (parent, twin) if len(s.output) < 6]:
        driver.advance(live)
    fresh = Driver(tiny())
    assert parent.output == twin.output == fresh.finish(fresh.open(ids), 6)


def test_the_librarys_best_token_is_the_samplers(tiny: Maker) -> None:
    """Greedy rows take the argmax of the fused head; those with log-probabilities go through the sampler."""
    driver = Driver(tiny())
    fused = driver.open(prompt(6, 20))
    sampled = driver.open(prompt(6, 20), sampling=Sampling(temperature=0.0, logprobs=1))
    while len(fused.output) < 12:
        driver.advance([fused, sampled])
    assert fused.output == sampled.output


def test_a_bad_token_fails_its_sequence_and_no_other(tiny: Maker) -> None:
    driver = Driver(tiny())
    expected = driver.finish(driver.open(prompt(7, 20)), 6)
    good, bad = driver.open(prompt(7, 20)), driver.open([1, 97, 2])
    driver.step((bad, 3), (good, 20))
    assert bad.failure is not None
    assert "vocabulary" in bad.failure
    assert driver.finish(good, 6) == expected


@pytest.mark.parametrize(("change", "word"), [({"context": 10**6}, "made for"), ({"path": "ghost"}, "no weights")])
def test_what_cannot_be_served_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ModelError, match=word):
        NativeExecutor.load(Config(model=ModelConfig(**({"path": str(tmp_path)} | change))))
