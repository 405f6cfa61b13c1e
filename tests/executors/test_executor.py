"""What the executor answers beside tokens: facts, failures of single residencies, log-probabilities, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.executors.cpu.executor import CpuExecutor
from tests.executors.conftest import Maker, load
from tests.executors.driver import DECODE, Driver
from tests.executors.tiny import VOCAB, save_tiny

PROMPT = [5, 6, 7, 8, 9]


def test_facts(tiny_folder: Path) -> None:
    facts = load(str(tiny_folder), 1, block_size=3, tokens=100).facts
    assert (facts.vocab_size, facts.context, facts.block_size, facts.total_blocks) == (VOCAB, 512, 3, 33)
    assert facts.block_bytes == 2 * 3 * 2 * 8 * 4 * 3  # keys and values, layers, heads, dims, bytes, tokens
    assert facts.model_id == "tiny"
    assert len(facts.cache_seed) == 16


@pytest.mark.parametrize(
    ("path", "tokens", "word"), [("ghost", 100, "no weights"), ("tiny", 2, "holds no block"), ("tiny", 10**12, "GiB")]
)
def test_what_cannot_be_loaded_says_why(tiny_folder: Path, path: str, tokens: int, word: str) -> None:
    with pytest.raises(ModelError, match=word):
        load(str(tiny_folder) if path == "tiny" else path, 1, tokens=tokens)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> CpuExecutor:
    """Token 40 is infinite."""
    folder = tmp_path_factory.mktemp("models") / "poisoned"
    model: Any = save_tiny(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = torch.inf
    model.save_pretrained(folder)
    return load(str(folder), 1)


@pytest.mark.parametrize("bad", [40, VOCAB, -1])
def test_a_sequence_that_cannot_be_computed_fails_alone(poisoned: CpuExecutor, tiny: Maker, bad: int) -> None:
    """Also in the steps that were planned before anyone knew, and its blocks serve others afterwards."""
    alone = Driver(tiny())
    expected = alone.finish(alone.open(PROMPT), 6)
    driver = Driver(poisoned)
    good, sick = driver.open(PROMPT), driver.open([1, 2, bad, 3])
    driver.step((good, 5), (sick, 4))
    assert good.failure is None
    assert sick.failure is not None
    assert good.output == expected[:1]
    sick.ids.append(0)
    driver.step((good, DECODE), (sick, DECODE))
    assert driver.last is not None
    assert [f.open_id for f in driver.last.failed] == [sick.open_id]
    driver.release(sick)
    driver.free += sick.table
    heir = driver.open(PROMPT)
    assert driver.finish(heir, 6) == driver.finish(good, 6) == expected


def test_logprobs_go_to_those_who_ask(tiny: Maker) -> None:
    driver = Driver(tiny())
    silent, asks = driver.open(PROMPT), driver.open(PROMPT, sampling=Sampling(temperature=0.0, logprobs=2))
    driver.step((silent, 5), (asks, 5))
    assert silent.logprobs == [None]
    [entry] = asks.logprobs
    assert entry is not None
    assert entry.token == asks.output[0] == entry.top_ids[0]
    assert entry.top_logprobs[0] == entry.logprob >= entry.top_logprobs[1]


def test_a_chunk_before_the_last_gives_no_token(tiny: Maker) -> None:
    driver = Driver(tiny())
    sequence = driver.open(PROMPT)
    result = driver.step((sequence, 3))
    assert (result.n_new.tolist(), result.kv_len.tolist(), result.tokens.tolist()) == ([0], [3], [])
    assert driver.step().slot.tolist() == []


def test_forget_leaves_nothing_resident(tiny: Maker) -> None:
    driver = Driver(tiny())
    sequence = driver.open(PROMPT)
    driver.step((sequence, 5))
    driver.executor.forget()
    with pytest.raises(KeyError):
        driver.step((sequence, DECODE))
