"""Adapters in the executors that compute: what they add is what merged weights give, and a row is the same in any
company."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.messages import Adapter, Sampling
from octavo.core.plugins import resolve
from octavo.executors.adapters import Holds
from octavo.executors.base import Executor
from tests.adapters.conftest import Made, made_in
from tests.adapters.made import merge, save_adapter
from tests.executors.driver import DECODE, Driver, Sequence
from tests.executors.test_exact import bits
from tests.executors.tiny import VOCAB

Make: TypeAlias = Callable[[], Executor]
TOLD = Sampling(temperature=0.0, logprobs=3, prompt_logprobs=0)
NEW = 6
KINDS: dict[str, dict[str, Any]] = {
    "cpu": {}, "native exact": {"mode": "exact"}, "native fast": {"mode": "fast"},
    "cuda-emulated exact": {"mode": "exact"}, "cuda-emulated fast": {"mode": "fast"},
}  # fmt: skip
MOST = {"cpu": 1e-4, "native exact": 1e-4, "native fast": 0.2, "cuda-emulated exact": 0.05, "cuda-emulated fast": 0.05}
"""That a log-probability may be off: in fp32 (measured: below 2e-5), with KV of 16 bits, and all in 16 bits (the same
without adapters)."""


def executor(base: Path, kind: str) -> Executor:
    config = Config(
        model=ModelConfig(path=str(base)),
        kv=KvConfig(tokens=4096),
        executor=ExecutorConfig(kind=kind.partition(" ")[0], threads=1, **KINDS[kind]),
    )
    made: Executor = resolve("octavo.executor", config.executor.kind).load(config)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """With heads of a size that CUDA kernels have."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    return made_in(tmp_path_factory.mktemp("adapters"), **shape)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(made: Made, kind: str) -> Executor:
    return executor(made.base, kind)


@pytest.fixture(scope="module")
def adapters(loaded: Executor, made: Made) -> dict[str, Adapter | None]:
    held = holds(loaded)
    return {"": None, **{name: held.load(name, str(getattr(made, name))) for name in ("red", "blue", "twin")}}


def holds(executor: Executor) -> Holds:
    assert executor.adapters is not None
    return executor.adapters


def prompt(seed: int, n: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(n)]


def alone(executor: Executor, ids: list[int], adapter: Adapter | None, sampling: Sampling = TOLD) -> Sequence:
    driver = Driver(executor)
    sequence = driver.open(ids, sampling=sampling, adapter=adapter)
    driver.finish(sequence, NEW)
    assert sequence.failure is None
    return sequence


def reference(base: Path, adapter: Path | None, ids: list[int]) -> torch.Tensor:
    """Log-probabilities after each of `ids`, [n, vocab], of merged weights by transformers."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.inference_mode():
        logits = (model if adapter is None else merge(model, adapter))(torch.tensor([ids])).logits[0]
    found: torch.Tensor = logits.log_softmax(-1)
    return found


@pytest.mark.parametrize("name", ["", "red", "blue"])
def test_it_is_what_merged_weights_give(
    loaded: Executor, kind: str, made: Made, adapters: dict[str, Adapter | None], name: str
) -> None:
    """Every log-probability of the chosen tokens and their alternatives."""
    ids, most = prompt(1, 40), MOST[kind]
    sequence = alone(loaded, ids, adapters[name])
    expected = reference(made.base, getattr(made, name) if name else None, sequence.ids)
    for i, entry in enumerate(sequence.logprobs):
        assert entry is not None
        row = expected[len(ids) - 1 + i]
        for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
            assert abs(value - float(row[token])) < most, (value, float(row[token]))


def test_what_adapters_hold_is_counted_until_nobody_names_them(made: Made) -> None:
    held = holds(executor(made.base, "native fast"))
    assert held.nbytes == 0
    red = held.load("red", str(made.red))
    alone = held.nbytes
    numbers = sum(tensor.numel() for tensor in load_file(made.red / "adapter_model.safetensors").values())
    assert 2 * numbers <= alone <= 16 * numbers  # 16 or 32 bits; rows are filled up to blocks of 16
    assert held.load("twin", str(made.twin)).digest == red.digest
    assert held.nbytes == alone  # the same content, held once
    held.load("blue", str(made.blue))
    assert held.nbytes > alone
    held.listed([red])
    assert held.nbytes == alone
    held.listed([])
    assert held.nbytes == 0


def test_one_in_use_that_lost_its_name_makes_room_for_the_next(made: Made) -> None:
    """Once it is not in use any more: nobody tells of names then."""
    loaded = executor(made.base, "native fast")
    held = holds(loaded)
    red = held.load("red", str(made.red))
    alone(loaded, prompt(5, 9), red)
    held.listed([])
    assert held.nbytes > 0
    loaded.forget()
    blue = held.load("blue", str(made.blue))
    only = held.nbytes
    held.listed([blue])
    assert held.nbytes == only


def test_adapters_differ_from_each_other_and_from_the_base(
    loaded: Executor, adapters: dict[str, Adapter | None]
) -> None:
    said = {name: tuple(alone(loaded, prompt(1, 40), adapter).output) for name, adapter in adapters.items()}
    assert said["red"] == said["twin"]
    assert len({said[""], said["red"], said["blue"]}) == 3


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_batch_gives_what_each_gives_alone(
    loaded: Executor, kind: str, adapters: dict[str, Adapter | None], seed: int
) -> None:
    """Bit for bit, whatever the chunks, and with preemptions; base rows in between. Nearly so where steps have linears
    of as many rows as there are."""
    draw = random.Random(seed)
    driver = Driver(loaded, seed)
    names = [draw.choice(["", "red", "blue", "twin"]) for _ in range(5)]
    samplings = [Sampling(temperature=0.8 * (i % 2), seed=i, logprobs=3) for i in range(5)]
    prompts = [prompt(i, draw.choice([1, 2, 17, 40])) for i in range(5)]
    live = [
        driver.open(ids, sampling=sampling, adapter=adapters[name])
        for ids, sampling, name in zip(prompts, samplings, names, strict=True)
    ]
    before: list[list[Any]] = [[] for _ in live]
    while waiting := [i for i, s in enumerate(live) if len(s.output) < NEW]:
        if draw.random() < 0.15:
            i = draw.choice(waiting)
            before[i] += live[i].logprobs
            driver.release(live[i])
            live[i] = driver.open(
                live[i].ids, prompt_len=live[i].prompt_len, sampling=samplings[i], adapter=adapters[names[i]]
            )
        chosen = draw.sample(waiting, draw.randint(1, len(waiting)))
        driver.step(*((live[i], _piece(live[i], draw.randint(1, 30))) for i in chosen))
    for i, sequence in enumerate(live):
        expected = alone(loaded, prompts[i], adapters[names[i]], samplings[i])
        assert sequence.output == expected.output, names[i]
        said = before[i] + sequence.logprobs
        if kind == "cuda-emulated fast":
            for got, want in zip(said, expected.logprobs, strict=True):
                assert got is not None
                assert want is not None
                assert got.logprob == pytest.approx(want.logprob, abs=0.05)
        else:
            assert bits(said) == bits(expected.logprobs), names[i]


def _piece(sequence: Sequence, n: int) -> int:
    return DECODE if sequence.left == 1 and sequence.output else min(n, sequence.left)


def test_a_fork_has_its_parents_adapter(loaded: Executor, adapters: dict[str, Adapter | None]) -> None:
    ids = prompt(4, 21)
    driver = Driver(loaded)
    parent = driver.open(ids, sampling=TOLD, adapter=adapters["red"])
    driver.step((parent, 20))
    child = driver.fork(parent, 20, ids[20:], sampling=TOLD, choice=1)
    driver.finish(child, NEW)
    assert child.output == alone(loaded, ids, adapters["red"]).output


def test_what_is_neither_held_nor_to_be_read_again_fails_by_name(
    loaded: Executor, made: Made, adapters: dict[str, Adapter | None], tmp_path: Path
) -> None:
    """And takes nobody with it. One that lost its name goes on from its files, if they are what they were."""
    path = Path(shutil.copytree(made.red, tmp_path / "mine"))
    held = holds(loaded)
    pinned = held.load("mine", str(path))
    others = [adapter for adapter in adapters.values() if adapter is not None and adapter.name != "twin"]
    held.listed([adapter for adapter in others if adapter.name != "red"])  # red's content goes
    expected = alone(loaded, prompt(5, 9), pinned).output
    loaded.forget()  # nobody uses it any more
    held.listed([adapter for adapter in others if adapter.name != "red"])
    save_adapter(path, LlamaForCausalLM.from_pretrained(made.base), seed=9)
    driver = Driver(loaded)
    wrong, right = driver.open(prompt(5, 9), adapter=pinned), driver.open(prompt(5, 9), adapter=adapters["blue"])
    driver.advance([wrong, right])
    assert wrong.failure is not None
    assert f"the adapter 'mine' is not held any more, and {path} has other content now" in wrong.failure
    assert wrong.output == []
    assert right.failure is None
    assert [lost.name for lost, _ in held.listed([*others, pinned])] == [], "red came back, and with it its content"
    assert alone(loaded, prompt(5, 9), pinned).output == expected
