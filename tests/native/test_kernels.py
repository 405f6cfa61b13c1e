"""Products and attention at every level this processor has, against numpy in float64."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest

from octavo.core.models.gguf import GgmlType
from octavo.executors.native.library import CMatrix, COp, CShape, CStep, Floats, Int32s, Isa, Kind, OpKind, int32s
from octavo.executors.native.matrix import Arena, Rows, fill, matrix_of, size_of
from tests.native.net import levels, library

STORED = {
    "f32": (GgmlType.F32, Kind.F32),
    "f16": (GgmlType.F16, Kind.F16),
    "bf16": (GgmlType.BF16, Kind.BF16),
    "q4_0": (GgmlType.Q4_0, Kind.W4),
    "q4_1": (GgmlType.Q4_1, Kind.W4),
    "q8_0": (GgmlType.Q8_0, Kind.W8),
}


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    """Every level, but for those that this processor lacks."""
    level: Isa = request.param
    if level not in levels():
        pytest.skip(f"this processor has no {level.name}")
    return level


def stored(name: str, rows: int, cols: int) -> tuple[Rows, Kind]:
    values = np.random.default_rng(rows * cols).normal(size=(rows, cols)).astype(np.float32)
    source, kind = STORED[name]
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(source)))
    return Rows(np.ascontiguousarray(data).view(np.uint8).reshape(-1), source, int32s(range(rows)), cols), kind


def packed(rows: Rows, kind: Kind, targets: list[int] | None = None) -> tuple[CMatrix, Arena]:
    matrix = matrix_of(library(), kind, len(rows.order), rows.cols)
    arena = Arena(size_of(matrix))
    matrix.data = arena.take(size_of(matrix))
    fill(library(), matrix, rows, int32s(targets or range(len(rows.order))))
    return matrix, arena


def product(isa: Isa, matrix: CMatrix, x: Floats, exact: bool) -> Floats:
    y = np.full((len(x), matrix.blocks * 16), np.nan, dtype=np.float32)
    x = np.ascontiguousarray(x)
    library().oct_linear(isa, matrix, x.ctypes.data, len(x), exact, y.ctypes.data)
    return y[:, : matrix.rows]


def int8_rows(x: Floats) -> tuple[Int32s, Floats]:
    """Groups of 32 as (numbers, scales)."""
    groups = x.reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    inverse = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), np.float32(0))
    return np.rint(groups * inverse).astype(np.int32), top / np.float32(127)


SHAPES = [(5, 32), (16, 96), (50, 576), (131, 160)]


@pytest.mark.parametrize("name", STORED)
def test_products_are_those_of_the_numbers_in_the_file(isa: Isa, name: str) -> None:
    for rows, cols in SHAPES + ([(19, 31)] if name in ("f32", "f16", "bf16") else []):
        part, kind = stored(name, rows, cols)
        matrix, _arena = packed(part, kind)
        weights = part.floats().astype(np.float64)
        x = np.random.default_rng(1).normal(size=(39, cols)).astype(np.float32) * 3
        x[7] = 0
        y = product(isa, matrix, x, exact=True)
        np.testing.assert_allclose(y, x.astype(np.float64) @ weights.T, atol=3e-5 * cols**0.5, rtol=0)
        if kind in (Kind.W4, Kind.W8):
            q, scale = int8_rows(x)
            near = (q * scale.astype(np.float64)).reshape(x.shape)
            fast = product(isa, matrix, x, exact=False)
            np.testing.assert_allclose(fast, near @ weights.T, atol=3e-5 * cols**0.5, rtol=0)
            assert np.abs(fast - y).max() > 0


@pytest.mark.parametrize("name", STORED)
def test_a_row_has_the_same_bits_in_any_company(isa: Isa, name: str) -> None:
    part, kind = stored(name, 83, 288)
    matrix, _arena = packed(part, kind)
    x = np.random.default_rng(2).normal(size=(101, 288)).astype(np.float32)
    for exact in (True, False):
        alone = np.concatenate([product(isa, matrix, x[i : i + 1], exact) for i in range(len(x))])
        for n in (2, 3, 4, 7, 8, 16, 31, 101):
            assert np.array_equal(product(isa, matrix, x[:n], exact), alone[:n])


@pytest.mark.parametrize("name", STORED)
def test_packing_keeps_every_number_and_puts_rows_where_they_belong(name: str) -> None:
    part, kind = stored(name, 37, 64)
    order = np.random.default_rng(3).permutation(37)
    matrix, _arena = packed(part._replace(order=int32s(order)), kind, [36 - i for i in range(37)])
    unit = np.eye(64, dtype=np.float32)
    assert np.array_equal(product(levels()[-1], matrix, unit, exact=True).T, part.floats()[order][::-1])


def test_floats_become_w8_when_asked() -> None:
    values = np.random.default_rng(4).normal(size=(20, 64)).astype(np.float32)
    matrix, _arena = packed(Rows.of_floats(values), Kind.W8)
    back = product(levels()[-1], matrix, np.eye(64, dtype=np.float32), exact=True).T
    assert 0 < np.abs(back - values).max() < np.abs(values).max() / 127 * 0.51


class Attention:
    """A model of nothing but attention: rows of q, k, v go in by its buffer."""

    def __init__(self, isa: Isa, heads: int, kv_heads: int, head_dim: int, block_size: int, kind: Kind) -> None:
        self.heads, self.kv_heads, self.head_dim, self.size = heads, kv_heads, head_dim, block_size
        context = 256
        self.blocks = 2 * -(-context // block_size)
        self.widths = int32s([-(-(heads + 2 * kv_heads) * head_dim // 16) * 16, -(-heads * head_dim // 16) * 16])
        turns = np.outer(np.arange(context), 0.3 ** np.arange(head_dim // 2))
        self.angles = np.stack([np.cos(turns), np.sin(turns)]).astype(np.float32)
        self.op = COp(kind=OpKind.ATTEND, source=0, target=1, heads=heads, scale=head_dim**-0.5)
        shape = CShape(1, kv_heads, head_dim, self.blocks, block_size, kind, context, 1, 2, isa)
        self.model = library().oct_model_new(
            shape, ctypes.addressof(self.op), 1, self.widths.ctypes.data, 2, self.angles.ctypes.data
        )

    def close(self) -> None:
        library().oct_model_free(self.model)

    def run(self, spans: list[tuple[Floats, int, list[int]]]) -> Floats:
        """Spans of (rows of q k v, first position, table)."""
        n = sum(len(rows) for rows, _, _ in spans)
        inputs, outputs = (
            np.ctypeslib.as_array(
                ctypes.cast(library().oct_buffer(self.model, i, n), ctypes.POINTER(ctypes.c_float)), (n, width)
            )
            for i, width in enumerate(self.widths.tolist())
        )
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        inputs[:, :width] = np.concatenate([rows for rows, _, _ in spans])
        arrays = {
            "ids": int32s([0] * n),
            "positions": int32s([p for rows, start, _ in spans for p in range(start, start + len(rows))]),
            "sequences": int32s([s for s, (rows, _, _) in enumerate(spans) for _ in rows]),
            "tables": int32s([b for _, _, table in spans for b in table]),
            "table_start": int32s(np.cumsum([0, *(len(table) for _, _, table in spans)])),
        }
        step = CStep(tokens=n, tables_count=len(spans), **{name: array.ctypes.data for name, array in arrays.items()})
        assert library().oct_step(self.model, step) == 0
        return outputs[:, : self.heads * self.head_dim].copy()

    def expected(self, rows: Floats) -> Floats:
        d, group = self.head_dim, self.heads // self.kv_heads
        parts = rows.astype(np.float64).reshape(len(rows), -1, d)
        cos, sin = self.angles[:, : len(rows), None, :].astype(np.float64)
        first, second = parts[..., : d // 2], parts[..., d // 2 :]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        out = np.empty((len(rows), self.heads, d))
        for h in range(self.heads):
            k, v = turned[:, self.heads + h // group], parts[:, self.heads + self.kv_heads + h // group]
            scores = turned[:, h] @ k.T / d**0.5
            scores[np.triu_indices(len(rows), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = weights / weights.sum(-1, keepdims=True) @ v
        return out.reshape(len(rows), -1).astype(np.float32)


HEADS = [(1, 1, 16), (6, 2, 8), (9, 3, 64), (4, 4, 80), (16, 1, 32), (14, 2, 48)]


@pytest.mark.parametrize("heads", HEADS)
def test_attention(isa: Isa, heads: tuple[int, int, int]) -> None:
    """Right, and with the same bits for every block size, chunk and company."""
    width = (heads[0] + 2 * heads[1]) * heads[2]
    draw = np.random.default_rng(heads[0])
    rows, others = (draw.normal(size=(n, width)).astype(np.float32) for n in (77, 30))
    found: list[Floats] = []
    for block_size, chunk in ((16, 77), (1, 5), (3, 13), (16, 1), (32, 30)):
        attention = Attention(isa, *heads, block_size, Kind.F32)
        order = np.random.default_rng(block_size).permutation(attention.blocks).tolist()
        mine, theirs = order[: len(order) // 2], order[len(order) // 2 :]
        out = []
        for at in range(0, 77, chunk):
            spans = [(rows[at : at + chunk], at, mine)]
            if at + chunk <= 30 and block_size == 3:
                spans.insert(0, (others[at : at + chunk], at, theirs))
            out.append(attention.run(spans)[-len(rows[at : at + chunk]) :])
        found.append(np.concatenate(out))
        np.testing.assert_allclose(found[-1], attention.expected(rows), atol=3e-6, rtol=0)
        assert np.array_equal(found[-1], found[0])
        attention.close()
    attention = Attention(isa, *heads, 16, Kind.BF16)
    near = attention.run([(rows, 0, list(range(5)))])
    assert 1e-5 < np.abs(near - found[0]).max() < 0.03
    attention.close()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ids": [-1, 0]}, "vocabulary"),
        ({"positions": [255, 256]}, "context"),
        ({"positions": [0, 2]}, "order"),
        ({"sequences": [0, 1]}, "order"),
        ({"sequences": [0, -1]}, "order"),
        ({"tables": [99]}, "table"),
        ({"table_start": [0, 0]}, "table"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(change: dict[str, list[int]], word: str) -> None:
    attention = Attention(levels()[-1], 1, 1, 16, 16, Kind.F32)
    plain = {"ids": [0, 0], "positions": [0, 1], "sequences": [0, 0], "tables": [0], "table_start": [0, 1]}
    arrays = {name: int32s(values) for name, values in (plain | change).items()}
    step = CStep(tokens=2, tables_count=1, **{name: array.ctypes.data for name, array in arrays.items()})
    code = library().oct_step(attention.model, step)
    attention.close()
    assert word in library().oct_error(code).decode()


@pytest.mark.parametrize(("threads", "phases", "chunks"), [(1, 5, 7), (2, 40, 3), (3, 60, 8), (8, 30, 1), (8, 20, 50)])
def test_every_chunk_is_run_once_and_phases_wait_for_each_other(threads: int, phases: int, chunks: int) -> None:
    """Also with more threads than cores, where they are put aside in the middle of anything."""
    rounds = 150
    expected = rounds * chunks * phases * (phases + 1) // 2
    assert library().oct_team_stress(threads, phases, chunks, rounds) == expected
