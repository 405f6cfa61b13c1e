"""Executors under test: a tiny random model, and the default one (loaded once, with pools as the test wants them)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the executor's package does, but torch is loaded here first

import msgspec
import pytest
import torch

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool
from tests.executors.tiny import save_tiny

Maker: TypeAlias = Callable[..., CpuExecutor]
"""block_size (16), tokens (1024) → an executor with an empty pool."""


def load(path: str, threads: int, *, block_size: int = 16, tokens: int = 1024) -> CpuExecutor:
    config = Config(
        model=ModelConfig(path=path),
        kv=KvConfig(block_size=block_size, tokens=tokens),
        executor=ExecutorConfig(threads=threads),
    )
    return CpuExecutor.load(config)


def maker(path: str, threads: int) -> Maker:
    loaded = load(path, threads)

    def make(block_size: int = 16, tokens: int = 1024) -> CpuExecutor:
        torch.set_num_threads(threads)  # the process's, and what the loaded model was found exact for
        blocks = tokens // block_size
        spec = loaded.forward.spec
        facts = msgspec.structs.replace(loaded.facts, block_size=block_size, total_blocks=blocks)
        with torch.inference_mode():
            pool = KvPool(PoolShape(blocks, block_size, spec.kv_heads, spec.head_dim), spec.layers)
        return CpuExecutor(loaded.forward, pool, facts)

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Maker:
    return maker(str(tiny_folder), threads=1)


@pytest.fixture(scope="session")
def smol() -> Maker:
    return maker("default", threads=2)
