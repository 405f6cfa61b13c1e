"""Which executor serves where the configuration leaves it open, and that it stays so for a whole run."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig, SpeculationConfig
from octavo.core.models.errors import ModelError
from octavo.core.plugins import PluginError
from octavo.executors.choice import load_executor
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.ghost import GhostExecutor
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.transformers.executor import TransformersExecutor
from tests.executors.tiny import save, save_tiny


def config(path: object) -> Config:
    return Config(model=ModelConfig(path=str(path)), kv=KvConfig(tokens=256), executor=ExecutorConfig(threads=1))


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing in the cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", os.fspath(tmp_path / "bin"))
    monkeypatch.setenv("OCTAVO_CACHE", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


def test_native_serves_what_it_can(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    chosen = load_executor(config(tmp_path), tmp_path, first=True)
    assert isinstance(chosen.executor, NativeExecutor)
    assert (chosen.kind, chosen.note) == ("native", "")


def test_without_a_compiler_the_other_one_serves_and_says_what_is_lost(
    tmp_path: Path, no_compiler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path)
    chosen = load_executor(config(tmp_path), tmp_path, first=True)
    assert isinstance(chosen.executor, CpuExecutor)
    assert "several times as fast" in chosen.note
    assert "install one (Debian: apt install g++)" in chosen.note
    assert chosen.note in "".join(capsys.readouterr())


def test_a_process_started_anew_has_the_executor_of_the_first(
    tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the compiler is there by now: other arithmetic could change an answer that is half told."""
    save_tiny(tmp_path)
    first = load_executor(config(tmp_path), tmp_path, first=True)
    monkeypatch.undo()
    again = load_executor(config(tmp_path), tmp_path, first=False)
    assert isinstance(again.executor, CpuExecutor)
    assert (again.kind, again.note) == (first.kind, first.note)
    assert again.executor.facts.cache_seed == first.executor.facts.cache_seed


def test_what_no_program_knows_is_the_librarys(tmp_path: Path) -> None:
    config_ = CohereConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=97
    )
    model = AutoModelForCausalLM.from_config(config_, dtype=torch.float32)  # type: ignore[no-untyped-call]
    save(model, tmp_path)
    chosen = load_executor(config(tmp_path), tmp_path, first=True)
    assert isinstance(chosen.executor, TransformersExecutor)
    assert "cohere" in chosen.note


def test_what_nobody_serves_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^there is no model"):
        load_executor(config(tmp_path / "nothing"), tmp_path, first=True)
    assert not (tmp_path / "executor").exists()


def test_options_that_its_drafter_does_not_take_are_told_rather_than_served_by_a_slower_one(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    leftover = msgspec.structs.replace(config(tmp_path), speculation=SpeculationConfig(options={"model": "small"}))
    with pytest.raises(PluginError, match=r"speculation\.options of the drafter 'ngram': .*model"):
        load_executor(leftover, tmp_path, first=True)


def test_the_ghost_needs_no_choice(tmp_path: Path) -> None:
    assert isinstance(load_executor(config("ghost"), tmp_path, first=True).executor, GhostExecutor)
