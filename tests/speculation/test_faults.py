"""A drafter that fails costs its guesses, not the engine; what it cannot do is seen before it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.core.messages import Sampling, StepBind
from octavo.core.models.errors import ModelError
from octavo.executors.cpu.executor import CpuExecutor
from octavo.executors.drafting.contract import Draft, Drafter, Want
from octavo.executors.drafting.drafting import MOST_FAILURES, Drafting
from octavo.executors.drafting.medusa import Head, load_heads, save_heads
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


@pytest.mark.parametrize("rows", [1, 3])
def test_distributions_of_another_shape_cost_their_guesses(
    tiny: CpuMaker, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Short(Drafter):
        def __init__(self) -> None:
            pass

        def draft(self, wants: Sequence[Want]) -> list[Draft]:
            return [Draft([1, 2], np.full((rows, VOCAB), 1 / VOCAB))] * len(wants)

    plain = tiny()
    drafting = Drafting(Short(), VOCAB, "rejection")
    executor = CpuExecutor(plain.forward, plain._pool, plain.facts, None, drafting)
    replica = Replica(executor, options={"tokens": 3})
    asks = [asked(0, PROMPT, tokens=12, sampling=Sampling(temperature=1.0, seed=5))]
    assert replica.run(asks) == Replica(tiny()).run(asks)
    assert f"the distributions of a draft are ({rows}, 97)" in "".join(capsys.readouterr())


@pytest.mark.parametrize("drafter", ["medusa", "eagle"])
@pytest.mark.parametrize("content", [b"", b"x" * 40, b"\x80\x02."])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_of_heads_is_refused_in_one_line(
    tiny: CpuMaker, tmp_path: Path, drafter: str, content: bytes, name: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"{name} cannot be read") as error:
        tiny("eagle", head=str(tmp_path)) if drafter == "eagle" else tiny("medusa", heads=str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("found", [[torch.zeros(2)], {"0.0.weight": 3}, {"0.0.weight": torch.tensor([[torch.nan]])}])
def test_heads_that_are_no_numbers_by_name_are_refused(tmp_path: Path, found: object) -> None:
    torch.save(found, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match=r"state dict|not finite"):
        load_heads(tmp_path, VOCAB)
