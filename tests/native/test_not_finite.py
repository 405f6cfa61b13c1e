"""Numbers that are not finite fail the sequence that they are of, are always seen, and nobody else's answer changes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.executors.drafting.contract import Draft, Drafter, Want
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.library import CMatrix, int32s
from octavo.executors.native.program import Inputs
from tests.executors.driver import DECODE, Driver
from tests.executors.tiny import save_tiny
from tests.native.net import make
from tests.speculation.replica import Replica, asked

BAD = 13


def poison(matrix: CMatrix, row: int) -> None:
    """No file would get so far."""
    numbers = ctypes.cast(matrix.data, ctypes.POINTER(ctypes.c_float))
    np.ctypeslib.as_array(numbers, (matrix.blocks, matrix.cols, 16))[row // 16, :, row % 16] = np.nan


@pytest.fixture
def executor(tmp_path: Path) -> NativeExecutor:
    """The embedding of one token is no number."""
    save_tiny(tmp_path)
    config = Config(model=ModelConfig(path=str(tmp_path)), kv=KvConfig(tokens=1024), executor=ExecutorConfig(threads=2))
    loaded = NativeExecutor.load(config)
    poison(loaded.model.weights.matrices["embed"], BAD)
    return loaded


def test_they_fail_their_sequence_only(executor: NativeExecutor) -> None:
    driver = Driver(executor)
    expected = driver.finish(driver.open([1, 2, 3]), 6)
    sick, good = driver.open([5, BAD, 6, 7]), driver.open([1, 2, 3])
    driver.step((sick, 4), (good, 3))
    assert sick.failure == "the model's numbers for positions [0, 4) are not finite"
    driver.step((sick, DECODE), (good, DECODE))
    driver.release(sick)
    driver.free += sick.table
    heir = driver.open([1, 2, 3])
    assert driver.finish(heir, 6) == driver.finish(good, 6) == expected


class Poisonous(Drafter):
    def __init__(self) -> None:
        self.asked = 0

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        self.asked += 1
        return [Draft([BAD] * want.most) for want in wants]


def test_a_guess_fails_nobody(executor: NativeExecutor) -> None:
    """Its V is in one tile with the tokens that do not see it, and nothing times NaN is NaN."""
    prompts = [[1, 2, 3], [(i * 29 + 3) % 97 for i in range(20)]]
    assert not any(BAD in prompt for prompt in prompts)
    expected = {}
    for i, prompt in enumerate(prompts):
        driver = Driver(executor)
        expected[i, 0] = driver.finish(driver.open(prompt), 8)
    drafter = Poisonous()
    drafting = Drafting(drafter, executor.facts.vocab_size)
    replica = Replica(NativeExecutor(executor.model, executor.facts, None, drafting), options={"tokens": 3})
    assert replica.run([asked(i, prompt, tokens=8) for i, prompt in enumerate(prompts)]) == expected
    assert drafter.asked > 4


def test_a_logit_is_seen_whatever_thread_computes_it(tmp_path: Path) -> None:
    """One row of the head is no number; the other threads' rows are sound."""
    save_tiny(tmp_path)
    native = make(from_folder(tmp_path), exact=True, threads=4)
    poison(native.weights.matrices["head"], 40)
    n, none = 16, int32s([])
    places = int32s(range(n)), int32s([0] * n), int32s([0]), int32s([0, 1])
    inputs = Inputs(int32s(range(n)), *places, int32s(range(n)), int32s([-1] * n), none, none)
    assert not any(any(native.step(inputs).sample_finite) for _ in range(400))
