"""Coupled verification on the default model, SmolLM2: one column of the grid, every drafter with four guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.messages import Enqueue, Sampling
from octavo.core.models.locate import locate
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.core.trace.catalogue import RequestPreempted
from octavo.executors.drafting.eagle_head import HeadSpec, save_head
from octavo.executors.drafting.medusa import Head, save_heads
from tests.bench.repetitive import chat, code_edit
from tests.speculation.conftest import CpuMaker, NativeMaker
from tests.speculation.replica import Replica, asked
from tests.speculation.test_coupled import AnyMaker, bits
from tests.speculation.test_eagle import random_head

K = 4
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "draft-model": ("draft-model", {"model": "default"}),
    "self": ("self", {"layers": 15}),
    "medusa": ("medusa", {"heads": "medusa"}),
    "medusa tree": ("medusa", {"heads": "medusa", "width": 2}),
    "eagle": ("eagle", {"head": "eagle"}),
    "eagle tree": ("eagle", {"head": "eagle", "width": 2}),
}


@pytest.fixture(scope="module", params=["native", "cpu"])
def real(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> AnyMaker:
    if not pytestconfig.getoption("--speculation-all"):
        pytest.skip("needs --speculation-all")
    path = str(locate("default").path)
    return NativeMaker(path) if request.param == "native" else CpuMaker(path)


@pytest.fixture(scope="module")
def requests() -> list[Enqueue]:
    """An answer that repeats its prompt, one that is sampled, twice, and one of a single token."""
    vocabulary = load_vocabulary(locate("default"))
    sampled = Sampling(temperature=0.7, seed=3, top_p=0.9, repetition=1.1, logprobs=1)
    edit, talk = vocabulary.encode(code_edit(0).prompt), vocabulary.encode(chat(1).prompt)
    return [
        asked(0, edit, tokens=200),
        asked(1, talk, tokens=200, sampling=sampled, n=2),
        asked(2, edit, tokens=1, sampling=sampled),
    ]


@pytest.fixture(scope="module")
def plain(real: AnyMaker, requests: list[Enqueue]) -> Replica:
    replica = Replica(real(), policy="off", slots=8)
    replica.run(requests)
    return replica


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random ones: wrong nearly always, as heads can be."""
    folder, draw = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(1)
    block = torch.zeros(576, 576), torch.zeros(576)
    save_heads(folder / "medusa", [Head([block], torch.randn(49152, 576, generator=draw)) for _ in range(2)])
    save_head(folder / "eagle", random_head(third=False, spec=HeadSpec(576, 9, 3, 64, 1e-5, 1e5), inner=256))
    return folder


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_answers_are_those_without_guesses(
    real: AnyMaker, requests: list[Enqueue], plain: Replica, heads: Path, name: str, root: Path
) -> None:
    drafter, options = DRAFTERS[name]
    options = {k: str(heads / v) if k in ("heads", "head") else v for k, v in options.items()}
    runs = []
    for tokens, crash_at in ((4096, -1), (560, -1), (4096, 20)):
        replica = Replica(real(drafter, tokens=tokens, **options), options={"tokens": K}, slots=8, crash_at=crash_at)
        assert replica.run(requests) == plain.said
        assert bits(replica.logprobs) == bits(plain.logprobs)
        assert any(isinstance(event, RequestPreempted) for event in replica.events) == (tokens == 560)
        runs.append(replica)
    drafted, accepted = sum(r.drafted for r in runs), sum(r.accepted for r in runs)
    assert drafted > 0
    kind = "native" if isinstance(real, NativeMaker) else "cpu"
    write(root / "tests/results/speculation_real.md", f"| {kind} | {name} ", f"| {drafted} | {accepted} |")


_ABOUT = f"""# Coupled verification on SmolLM2-135M-Instruct

Drafts of {K}; a greedy code edit and two choices of a sampled chat, answers of 200 tokens, and one of a single token.
In every row token ids and log-probabilities are those without guesses. Each was run three times: with room for all,
preempted for want of blocks, and with the executor dying at its 20th step. Heads are random here: nearly always wrong.
Written by `pytest tests/speculation/test_real_model.py --speculation-all`.

| executor | drafter | guesses verified | right |
|---|---|---|---|
"""


def write(file: Path, cell: str, found: str) -> None:
    """With what was found of the others before."""
    known = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = {row for row in known if row.startswith(("| native", "| cpu")) and not row.startswith(cell + "|")}
    file.write_text(_ABOUT + "\n".join(sorted({*rows, cell + found})) + "\n", encoding="utf-8")
