"""What drafters see of a model is the same model on both executors, whole or its first layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from octavo.executors.drafting.contract import Draft, Drafter, Host, Stack, Want
from octavo.executors.residents import Span
from tests.executors.tiny import VOCAB
from tests.speculation.conftest import CpuMaker, NativeMaker

IDS = [(i * 31 + 7) % VOCAB for i in range(11)]


class Kept(Drafter):
    """Only keeps what it is given."""

    stacks: list[Stack]

    def __init__(self, host: Host, options: object) -> None:
        assert host.target is not None
        self.stacks.append(host.target)

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        raise NotImplementedError


@pytest.fixture
def both(tiny: CpuMaker, tiny_native: NativeMaker) -> Iterator[list[Stack]]:
    Kept.stacks = []
    tiny(Kept), tiny_native(Kept)
    with torch.inference_mode():
        yield Kept.stacks


@pytest.mark.parametrize("layers", [None, 1])
def test_both_executors_say_the_same(both: list[Stack], layers: int | None) -> None:
    theirs, ours = both
    assert (theirs.vocab_size, theirs.layers, theirs.width) == (ours.vocab_size, ours.layers, ours.width)
    torch.testing.assert_close(ours.embed(IDS), theirs.embed(IDS), atol=0, rtol=0)
    tables = [2, 0, 7], [5, 1]
    first = [Span(IDS[:7], 0, tables[0]), Span(IDS[3:8], 0, tables[1])]
    then = [Span(IDS[7:], 7, tables[0])]  # after what is in the blocks
    for spans in (first, then):
        hidden = [stack.hidden(spans, layers) for stack in both]
        torch.testing.assert_close(hidden[1], hidden[0], atol=2e-4, rtol=2e-4)
        np.testing.assert_allclose(ours.after(spans, layers), theirs.after(spans, layers), atol=1e-3)
        ends = (np.cumsum([len(span.ids) for span in spans]) - 1).tolist()
        assert np.array_equal(ours.logits(hidden[1][ends]).numpy(), ours.after(spans, layers))


def test_copied_blocks_hold_the_same(both: list[Stack]) -> None:
    for stack in both:
        stack.after([Span(IDS[:8], 0, [3, 4])])
        stack.copy_blocks([3, 4], [4, 9])
        assert np.array_equal(stack.after([Span(IDS[8:], 8, [4, 9, 1])]), stack.after([Span(IDS, 0, [6, 7, 8])]))


def test_an_id_that_is_none_has_no_embedding(tiny_native: NativeMaker) -> None:
    Kept.stacks = []
    tiny_native(Kept)
    with pytest.raises(IndexError, match="97 tokens"):
        Kept.stacks[0].embed([VOCAB])
