"""The script that trains heads, on a model so small that it takes seconds: what was learnt is right where asked."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from octavo.executors.cpu.executor import CpuExecutor
from tests.executors.tiny import VOCAB, save_tiny
from tests.speculation.conftest import CpuMaker
from tests.speculation.replica import Replica, asked

SCRIPT = Path(__file__).resolve().parents[2] / "examples/train_heads.py"
TOKENS, RATE = 40, 5e-3
PROMPTS = [[(i * 13 + j * 5) % VOCAB for j in range(4 + i % 3)] for i in range(4)]


@pytest.fixture(scope="module")
def train_heads() -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("train_heads", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> CpuMaker:
    folder = tmp_path_factory.mktemp("trained") / "model"
    save_tiny(folder, num_hidden_layers=4)
    return CpuMaker(str(folder))


def accepted(executor: CpuExecutor) -> float:
    """Of guesses, how many were right; on the texts that were learnt: it is about places and positions, not talent."""
    replica = Replica(executor, options={"tokens": 2})
    replica.run([asked(i, ids, tokens=TOKENS) for i, ids in enumerate(PROMPTS)])
    return replica.accepted / replica.drafted


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_heads_learn_what_comes_next(train_heads: ModuleType, maker: CpuMaker, tmp_path: Path, kind: str) -> None:
    said = Replica(maker(), policy="off").run([asked(i, ids, tokens=TOKENS) for i, ids in enumerate(PROMPTS)])
    target, texts = train_heads.look(maker.path, [ids + said[i, 0] for i, ids in enumerate(PROMPTS)])
    words = train_heads.Words(texts, VOCAB)

    def trained(passes: int) -> float:
        folder = tmp_path / str(passes)
        torch.manual_seed(0)
        if kind == "medusa":
            train_heads.medusa(folder, target, texts, words, passes, RATE)
            return accepted(maker("medusa", heads=str(folder)))
        train_heads.eagle(folder, target, texts, words, passes, RATE, third=kind == "eagle3")
        return accepted(maker("eagle", head=str(folder)))

    assert trained(80) > trained(1) + 0.3
