"""The CPU and the native executor on a tiny random model, with any drafter: the model is loaded once."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the executor's package does, but torch is loaded here first

import msgspec
import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig, SpeculationConfig
from octavo.core.grammar import Grammars
from octavo.core.messages import Facts
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool, Llama
from octavo.executors.cpu.stacks import Stacks
from octavo.executors.drafting.contract import Drafter, Host
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.medusa import Head, save_heads
from octavo.executors.native import stacks as native
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.program import Native, Pool
from tests.executors.tiny import VOCAB, save_tiny

BLOCK_SIZE = 4
E = TypeVar("E", CpuExecutor, NativeExecutor)


class Maker(ABC, Generic[E]):
    """Executors with an empty pool around one loaded model."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._config = Config(
            model=ModelConfig(path=path),
            kv=KvConfig(block_size=BLOCK_SIZE, tokens=2048),
            executor=ExecutorConfig(threads=1, mode="exact"),
        )

    def __call__(
        self,
        drafter: str | type[Drafter] | None = None,
        *,
        tokens: int = 2048,
        host_tokens: int = 0,
        rule: str = "coupled",
        grammars: Grammars | None = None,
        **options: Any,
    ) -> E:
        """`drafter` is an installed one, or a class."""
        name = drafter if isinstance(drafter, str) else None
        speculation = SpeculationConfig(drafter=name, verification=rule, options=options)  # type: ignore[arg-type]
        config = msgspec.structs.replace(self._config, speculation=speculation)

        def drafting(host: Host) -> Drafting:
            if isinstance(drafter, type):
                made = drafter(host, drafter.Options(**options))
                return Drafting(made, host.facts.vocab_size, speculation.verification, trees=host.trees)
            return Drafting.of(host)

        blocks, host_blocks = tokens // BLOCK_SIZE, host_tokens // BLOCK_SIZE
        facts = msgspec.structs.replace(self._facts, total_blocks=blocks, host_blocks=host_blocks)
        return self._make(config, facts, grammars, drafting)

    @property
    @abstractmethod
    def _facts(self) -> Facts:
        """Of the loaded model."""

    @abstractmethod
    def _make(
        self, config: Config, facts: Facts, grammars: Grammars | None, drafting: Callable[[Host], Drafting]
    ) -> E: ...


class CpuMaker(Maker[CpuExecutor]):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._loaded = CpuExecutor.load(self._config)

    @property
    def _facts(self) -> Facts:
        return self._loaded.facts

    def _make(
        self, config: Config, facts: Facts, grammars: Grammars | None, drafting: Callable[[Host], Drafting]
    ) -> CpuExecutor:
        torch.set_num_threads(1)
        llama = self._loaded.forward
        assert isinstance(llama, Llama)
        spec = llama.spec
        with torch.inference_mode():
            pool = KvPool(PoolShape(facts.places, BLOCK_SIZE, spec.kv_heads, spec.head_dim), spec.layers)
            stacks = Stacks(llama, pool, facts)
            made = drafting(Host(config, facts, stacks.target, stacks.open, trees=True, claim=stacks.claim, taps=True))
        return CpuExecutor(llama, pool, facts, grammars, made)


class NativeMaker(Maker[NativeExecutor]):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._loaded = NativeExecutor.load(self._config)

    @property
    def _facts(self) -> Facts:
        return self._loaded.facts

    def _make(
        self, config: Config, facts: Facts, grammars: Grammars | None, drafting: Callable[[Host], Drafting]
    ) -> NativeExecutor:
        loaded = self._loaded.model
        model = Native(loaded.weights, Pool(facts.places, BLOCK_SIZE, loaded.pool.kind), 1, loaded.isa)
        stacks = native.Stacks(model, facts, config.executor.weights)
        host = Host(config, facts, stacks.target, stacks.open, trees=True, claim=stacks.claim, taps=True)
        return NativeExecutor(model, facts, grammars, drafting(host))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "small"
    save_tiny(folder, num_hidden_layers=1, hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
    return folder


@pytest.fixture(scope="session")
def heads_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Medusa heads: of one and of two residual blocks."""
    folder, generator = tmp_path_factory.mktemp("models") / "heads", torch.Generator().manual_seed(1)

    def block() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(48, 48, generator=generator) * 0.1, torch.randn(48, generator=generator)

    heads = [Head([block() for _ in range(1 + i % 2)], torch.randn(VOCAB, 48, generator=generator)) for i in range(3)]
    save_heads(folder, heads)
    return folder


@pytest.fixture(scope="session")
def tiny(folder: Path) -> CpuMaker:
    return CpuMaker(str(folder))


@pytest.fixture(scope="session")
def tiny_native(folder: Path) -> NativeMaker:
    return NativeMaker(str(folder))
