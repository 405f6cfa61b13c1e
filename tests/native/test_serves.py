"""What is asked of an answer, in both modes: whatever the cpu executor serves, and the same of it in exact mode."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.grammar import GrammarError, Mask
from octavo.core.messages import Grammar, Sampling, TokenLogprob
from octavo.executors.base import Executor
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.native.executor import NativeExecutor
from tests.executors.driver import Driver, Sequence
from tests.executors.test_loading import write_gguf
from tests.executors.tiny import VOCAB, save_tiny

Mode = Literal["exact", "fast"]
Kv = Literal["auto", "int8"]
PROMPT = [(i * 37 + 5) % VOCAB for i in range(41)]
NEW = 12
ASKED = {
    "greedy": Sampling(temperature=0.0, logprobs=3),
    "drawn": Sampling(temperature=0.9, seed=3),
    "truncated": Sampling(temperature=1.2, top_k=30, top_p=0.9, min_p=0.01, seed=4),
    "penalised": Sampling(temperature=0.0, repetition=1.3, presence=0.5, frequency=0.25),
    "biased": Sampling(temperature=0.0, bias={7: 3.0, 8: -100.0}),
    "allowed": Sampling(temperature=0.0, allowed=(3, 5, 8, 13, 21)),
    "banned": Sampling(temperature=0.0, banned=((11,), (5, 3), (8, 8))),
    "held": Sampling(temperature=0.0, min_tokens=6, ends=tuple(range(0, VOCAB, 2))),
    "explained": Sampling(temperature=0.7, seed=5, prompt_logprobs=2, logprobs=1),
    "ruled": Sampling(temperature=0.5, seed=6, grammar=Grammar("regex", "even")),
}


class EvenThenOdd:
    """Grammars over plain numbers: an answer alternates between even and odd ids."""

    def __init__(self) -> None:
        self._taken = 0

    def start(self, grammar: Grammar) -> EvenThenOdd:
        return EvenThenOdd()

    def take(self, tokens: list[int]) -> None:
        self._taken += len(tokens)

    def mask(self) -> Mask:
        return np.asarray(np.arange(VOCAB) % 2 == self._taken % 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serves")
    write_gguf(
        folder / "m.gguf", save_tiny(folder, hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    )
    return folder / "m.gguf"


def config(path: Path, mode: Mode, kv: Kv = "auto") -> Config:
    executor = ExecutorConfig(mode=mode, kv=kv, threads=2)
    return Config(model=ModelConfig(path=str(path)), kv=KvConfig(tokens=4096), executor=executor)


def native(path: Path, mode: Mode, kv: Kv = "auto") -> NativeExecutor:
    loaded = NativeExecutor.load(config(path, mode, kv))
    return NativeExecutor(loaded.model, loaded.facts, EvenThenOdd())


class Said(msgspec.Struct):
    output: list[int]
    logprobs: list[TokenLogprob | None]
    prompt: list[TokenLogprob]


def together(executor: Executor, chunk: int) -> dict[str, Said]:
    """What everyone says who asks for something, all in the same steps, with prompts cut into chunks."""
    driver = Driver(executor)
    live = {name: driver.open(PROMPT, sampling=sampling) for name, sampling in ASKED.items()}
    prompts: dict[int, list[TokenLogprob]] = {s.open_id: [] for s in live.values()}

    def step(sequences: list[Sequence]) -> None:
        driver.advance(sequences, chunk)
        assert driver.last is not None
        for piece in driver.last.prompts:
            assert piece.start == len(prompts[piece.open_id]) + 1
            prompts[piece.open_id] += piece.entries

    while waiting := [s for s in live.values() if len(s.output) < NEW]:
        step(waiting)
        assert not [s.failure for s in live.values() if s.failure]
    return {name: Said(s.output, s.logprobs, prompts[s.open_id]) for name, s in live.items()}


def alone(executor: Executor, name: str) -> list[int]:
    driver = Driver(executor)
    return driver.finish(driver.open(PROMPT, sampling=ASKED[name]), NEW)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_everything_is_served_and_depends_on_no_company(path: Path, mode: Mode) -> None:
    executor = native(path, mode)
    assert set(executor.facts.serves) >= {"prompt_logprobs", "restrictions", "grammar"}
    said = together(executor, 100)
    assert msgspec.to_builtins(together(executor, 7)) == msgspec.to_builtins(said)
    assert {name: alone(executor, name) for name in ASKED} == {name: s.output for name, s in said.items()}
    assert set(said["allowed"].output) <= {3, 5, 8, 13, 21}
    assert 11 not in said["banned"].output
    assert not any(token % 2 == 0 for token in said["held"].output[:6])
    assert [token % 2 for token in said["ruled"].output] == [0, 1] * (NEW // 2)
    assert len(said["explained"].prompt) == len(PROMPT) - 1
    assert [entry.token for entry in said["explained"].prompt] == PROMPT[1:]
    assert said["greedy"].output != said["biased"].output


def test_exact_mode_says_what_the_cpu_executor_says(path: Path) -> None:
    loaded = CpuExecutor.load(config(path, "exact"))
    theirs = together(CpuExecutor(loaded.forward, loaded._pool, loaded.facts, EvenThenOdd()), 16)
    ours = together(native(path, "exact"), 16)
    assert {name: s.output for name, s in ours.items()} == {name: s.output for name, s in theirs.items()}
    for name in ("greedy", "explained"):
        for mine, other in zip(
            [*ours[name].prompt, *ours[name].logprobs], [*theirs[name].prompt, *theirs[name].logprobs], strict=True
        ):
            assert mine is not None
            assert other is not None
            assert (mine.token, mine.top_ids) == (other.token, other.top_ids)
            np.testing.assert_allclose(mine.top_logprobs, other.top_logprobs, atol=1e-4)


def test_a_sequence_that_cannot_go_on_in_its_grammar_fails_alone(path: Path) -> None:
    class Nowhere(EvenThenOdd):
        def start(self, grammar: Grammar) -> EvenThenOdd:
            raise GrammarError("it leads nowhere")

    executor = native(path, "fast")
    driver = Driver(NativeExecutor(executor.model, executor.facts, Nowhere()))
    bad, good = driver.open(PROMPT, sampling=ASKED["ruled"]), driver.open(PROMPT)
    driver.step((bad, len(PROMPT)), (good, len(PROMPT)))
    assert bad.failure == "it leads nowhere"
    assert good.failure is None
