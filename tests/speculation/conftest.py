"""The CPU executor on a tiny random model, with any drafter: the model is loaded once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the executor's package does, but torch is loaded here first

import msgspec
import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig, SpeculationConfig
from octavo.core.grammar import Grammars
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool, Llama
from octavo.executors.cpu.stacks import Stacks
from octavo.executors.drafting.contract import Drafter, Host
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.medusa import Head, save_heads
from tests.executors.tiny import VOCAB, save_tiny

BLOCK_SIZE = 4


class Maker:
    """Executors with an empty pool around one loaded model."""

    def __init__(self, path: str) -> None:
        self.path = path
        config = Config(
            model=ModelConfig(path=path),
            kv=KvConfig(block_size=BLOCK_SIZE, tokens=2048),
            executor=ExecutorConfig(threads=1),
        )
        self._loaded = CpuExecutor.load(config)
        self._config = config

    def __call__(
        self,
        drafter: str | type[Drafter] | None = None,
        *,
        tokens: int = 2048,
        rule: str = "coupled",
        grammars: Grammars | None = None,
        **options: Any,
    ) -> CpuExecutor:
        """`drafter` is an installed one, or a class."""
        torch.set_num_threads(1)
        llama, blocks = self._loaded.forward, tokens // BLOCK_SIZE
        assert isinstance(llama, Llama)
        spec, facts = llama.spec, msgspec.structs.replace(self._loaded.facts, total_blocks=blocks)
        name = drafter if isinstance(drafter, str) else None
        speculation = SpeculationConfig(drafter=name, verification=rule, options=options)  # type: ignore[arg-type]
        config = msgspec.structs.replace(self._config, speculation=speculation)
        with torch.inference_mode():
            pool = KvPool(PoolShape(blocks, BLOCK_SIZE, spec.kv_heads, spec.head_dim), spec.layers)
            stacks = Stacks(llama, pool, facts)
            host = Host(config, facts, stacks.target, stacks.open)
            if isinstance(drafter, type):
                made = drafter(host, drafter.Options(**options))
                drafting = Drafting(made, facts.vocab_size, speculation.verification)
            else:
                drafting = Drafting.of(host)
        return CpuExecutor(llama, pool, facts, grammars, drafting)


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
def tiny(folder: Path) -> Maker:
    return Maker(str(folder))
