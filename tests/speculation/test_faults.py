"""A drafter that fails costs its guesses, not the engine; what it cannot do is seen before it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from octavo.core.messages import StepBind
from octavo.core.models.errors import ModelError
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.drafting.contract import Draft, Drafter, Want
from octavo.executors.drafting.drafting import MOST_FAILURES, Drafting
from octavo.executors.drafting.medusa import Head, save_heads
from octavo.executors.residents import Resident
from tests.executors.tiny import VOCAB, save_tiny
from tests.speculation.conftest import CpuMaker
from tests.speculation.replica import Replica, asked

PROMPT = [(i * 29 + 3) % VOCAB for i in range(10)]


def answers(executor: CpuExecutor) -> dict[tuple[int, int], list[int]]:
    replica = Replica(executor, options={"tokens": 3})
    return replica.run([asked(i, [*PROMPT, i], tokens=16 + 4 * i) for i in range(2)])


class Faulty(Drafter):
    """Raises in `where`, from the second time on."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls = 0

    def _fail(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls > 1:
                raise IndexError("index 512 is out of bounds")

    def bound(self, bind: StepBind) -> None:
        self._fail("bound")

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        self._fail("draft")
        return [Draft([1])] * (len(wants) + (self.where == "too many"))

    def left(self, resident: Resident) -> None:
        self._fail("left")


@pytest.mark.parametrize("where", ["bound", "draft", "too many", "left"])
def test_what_a_drafter_raises_costs_its_guesses_only(
    tiny: CpuMaker, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, drafter = tiny(), Faulty(where)
    expected = answers(plain)
    drafting = Drafting(drafter, plain.facts.vocab_size)
    executor = CpuExecutor(plain.forward, plain._pool, plain.facts, None, drafting)
    assert answers(executor) == expected
    assert "the drafter Faulty failed" in "".join(capsys.readouterr())
    if where == "left":
        assert drafting.failures == 1  # of two requests, the second left
        return
    assert drafting.failures == MOST_FAILURES
    calls = drafter.calls
    assert answers(executor) == expected
    assert drafter.calls == calls, "it is not asked any more"


def test_a_text_longer_than_the_draft_models_context_goes_on_without_guesses(tiny: CpuMaker, tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    save_tiny(tmp_path, **small, max_position_embeddings=20)
    executor = tiny("draft-model", model=str(tmp_path))
    replica = Replica(executor, options={"tokens": 3})
    assert replica.run([asked(0, PROMPT, tokens=30)]) == Replica(tiny()).run([asked(0, PROMPT, tokens=30)])
    assert replica.drafted > 0
    assert executor._drafting.failures == 0


@pytest.mark.parametrize("where", ["block", "out"])
def test_heads_for_states_of_another_size_are_refused(tiny: CpuMaker, tmp_path: Path, where: str) -> None:
    block, out = (24, 48) if where == "block" else (48, 24)
    save_heads(tmp_path, [Head([(torch.zeros(block, block), torch.zeros(block))], torch.zeros(VOCAB, out))])
    with pytest.raises(ModelError, match="hidden states of 24 numbers, the model's have 48"):
        tiny("medusa", heads=str(tmp_path))
