"""The script that trains heads, on a model so small that it takes seconds: what was learnt is right where asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import train_heads
from octavo.executors.cpu.executor import CpuExecutor
from tests.executors.tiny import VOCAB, save_tiny
from tests.speculation.conftest import CpuMaker
from tests.speculation.replica import Replica, asked

TOKENS, RATE = 40, 5e-3
PROMPTS = [[(i * 13 + j * 5) % VOCAB for j in range(4 + i % 3)] for i in range(4)]


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
def test_heads_learn_what_comes_next(maker: CpuMaker, tmp_path: Path, kind: str) -> None:
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
