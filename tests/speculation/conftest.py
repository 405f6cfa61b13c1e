"""The CPU executor on a tiny random model, with any drafter: the model is loaded once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the executor's package does, but torch is loaded here first

import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig, SpeculationConfig
from octavo.executors.cpu.executor import CpuExecutor
from tests.executors.tiny import save_tiny

Maker: TypeAlias = Callable[..., CpuExecutor]
"""drafter (None), tokens (2048), block_size (4), verification, options → an executor with an empty pool."""


def made(path: str, drafter: str | None = None, *, tokens: int = 2048, block_size: int = 4, threads: int = 1,
         verification: str = "coupled", **options: object) -> CpuExecutor:  # fmt: skip
    config = Config(
        model=ModelConfig(path=path),
        kv=KvConfig(block_size=block_size, tokens=tokens),
        executor=ExecutorConfig(threads=threads),
        speculation=SpeculationConfig(drafter=drafter, verification=verification, options=options),  # type: ignore[arg-type]
    )
    return CpuExecutor.load(config)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder, num_hidden_layers=2)
    torch.set_num_threads(1)
    return folder
