"""Tokens of a tree get, bit for bit, what the chain of their branch gets; and a copied cell is whole."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from octavo.core.models.locate import locate
from octavo.executors.loading.checkpoint import Checkpoint
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.native.batch import of_spans
from octavo.executors.native.library import Floats, Int32s, Kind, int32s
from octavo.executors.native.program import Native, Pool, StepError
from octavo.executors.native.weights import Weights
from octavo.executors.residents import Span, slots_of
from tests.executors.tiny import VOCAB, save_tiny
from tests.native.families import save_family
from tests.native.net import levels, library

BLOCKS, NODES = 48, 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With a window in one of its layers."""
    folder = tmp_path_factory.mktemp("tree")
    save_tiny(folder, num_hidden_layers=2)
    made = open_checkpoint(locate(str(folder)))
    return replace(made, spec=replace(made.spec, windows=(0, 20)))


def rows(native: Native, span: Span) -> Floats:
    """Logits of each of its tokens."""
    inputs = of_spans([span], samples=False)
    each = int32s(range(len(span.ids)))
    out = native.step(inputs._replace(sample_rows=each, logit_rows=each))
    assert all(out.finite)
    return out.logits


@pytest.mark.parametrize("exact", [True, False])
def test_a_branch_over_latents_is_its_chain(tmp_path: Path, exact: bool) -> None:
    save_family("deepseek_v2", tmp_path)
    check_branches(open_checkpoint(locate(str(tmp_path))), Kind.F32 if exact else Kind.BF16, 254, 16)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.I8])
def test_a_branch_with_slopes_is_its_chain(checkpoint: Checkpoint, kind: Kind) -> None:
    sloping = replace(checkpoint.spec, slopes=tuple(0.5 ** (i + 1) for i in range(checkpoint.spec.heads)))
    check_branches(replace(checkpoint, spec=sloping), kind, 254, 4)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.I8])
@pytest.mark.parametrize("known", [1, 14, 254, 270])
def test_a_branch_is_its_chain(checkpoint: Checkpoint, kind: Kind, known: int, block_size: int) -> None:
    check_branches(checkpoint, kind, known, block_size)


def check_branches(checkpoint: Checkpoint, kind: Kind, known: int, block_size: int) -> None:
    """Across tiles of 16 positions and segments of 256; then the deepest branch stays and the text goes on."""
    draw = random.Random(known)
    weights = Weights(library(), checkpoint, exact=kind is Kind.F32)
    blocks = BLOCKS * 16 // block_size
    natives = [
        Native(weights, Pool(blocks, block_size, kind), threads, isa)
        for threads, isa in ((2, None), (1, levels()[0]))[: 1 + (known == 14)]
    ]
    order = draw.sample(range(blocks), blocks)
    half = len(order) // 2
    text = [draw.randrange(VOCAB) for _ in range(known)]
    guesses = [draw.randrange(VOCAB) for _ in range(NODES)]
    paths: list[list[int]] = [[known - 1]]
    for i in range(NODES):
        paths.append([*draw.choice(paths), known + i])
    deepest = max(range(NODES + 1), key=lambda row: len(paths[row]))
    for native in natives:
        here, there = order[:half], order[half:]
        before = Span(text[:-1], 0, here)
        if before.ids:
            rows(native, before)
        got = rows(native, Span([text[-1], *guesses], known - 1, here, paths))
        for row, path in enumerate(paths):
            chain = [*text, *(guesses[cell - known] for cell in path[1:])]
            assert np.array_equal(rows(native, Span(chain, 0, there))[-1], got[row])
        path = paths[deepest]
        cells, places = np.array(path), np.arange(known - 1, known - 1 + len(path))
        native.copy_cells(slots(here, cells, block_size), slots(here, places, block_size))
        chain = [*text, *(guesses[cell - known] for cell in path[1:])]
        after = rows(native, Span([5], len(chain), here))
        assert np.array_equal(rows(native, Span([*chain, 5], 0, there))[-1], after[0])


def slots(table: list[int], cells: npt.NDArray[np.int64], size: int) -> Int32s:
    return int32s(slots_of(table, cells, size))


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([[3], [3, -1]], "do not stand together in order"),
        ([[3], [0, 1, 2, 3, 4, 5]], "do not stand together in order"),
        ([[3], [3, 8]], "too short"),
    ],
)
def test_paths_that_lead_out_of_the_text_are_refused(checkpoint: Checkpoint, paths: list[list[int]], says: str) -> None:
    native = Native(Weights(library(), checkpoint, exact=True), Pool(4, 4, Kind.F32), 1)
    inputs = of_spans([Span([1, 2], 3, [2, 1], [[3], [3, 4]])])
    starts = int32s(np.cumsum([0, *map(len, paths)]))
    with pytest.raises(StepError, match=says):
        native.step(inputs._replace(paths=int32s([cell for path in paths for cell in path]), path_start=starts))


def test_cells_outside_of_the_pool_are_refused(checkpoint: Checkpoint) -> None:
    native = Native(Weights(library(), checkpoint, exact=True), Pool(4, 4, Kind.F32), 1)
    for cell in (-1, 16):
        with pytest.raises(StepError, match="not all in the pool"):
            native.copy_cells(int32s([0]), int32s([cell]))
        with pytest.raises(StepError, match="not all in the pool"):
            native.copy_cells(int32s([cell]), int32s([0]))


def test_a_tree_in_company_changes_nobody(checkpoint: Checkpoint) -> None:
    """Two trees and two chains in one step, whichever comes first."""
    native = Native(Weights(library(), checkpoint, exact=True), Pool(32, 4, Kind.F32), 2)
    tables = [list(range(i * 8, i * 8 + 8)) for i in range(4)]
    text = [7, 8, 9, 10, 11]
    tree = [[4], [4, 5], [4, 5, 6], [4, 7]]
    for table in tables:
        rows(native, Span(text[:-1], 0, table))
    spans = [
        Span([11, 20, 21, 22], 4, tables[0], tree),
        Span([11, 20, 21], 4, tables[1]),
        Span([11], 4, tables[2]),
        Span([11, 20, 21, 22], 4, tables[3], tree),
    ]
    alone = [rows(native, span)[-1] for span in spans]
    for turn in (spans, spans[::-1]):
        together = native.step(of_spans(turn)).logits
        for span, logits in zip(turn, together, strict=True):
            assert np.array_equal(logits, alone[spans.index(span)])
