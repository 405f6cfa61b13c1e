"""Products and attention at every level this processor has, against numpy in float64."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest

from octavo.core.models.errors import ModelError
from octavo.core.models.gguf import BLOCK_LAYOUT, GgmlType
from octavo.executors.loading.rows import Rows
from octavo.executors.native.library import (
    CAngles,
    CMatrix,
    COp,
    CShape,
    CStep,
    Floats,
    Int32s,
    Isa,
    Kind,
    OpKind,
    int32s,
)
from octavo.executors.native.matrix import Arena, fill, matrix_of, size_of
from tests.native.net import levels, library

STORED = {
    "f32": (GgmlType.F32, Kind.F32),
    "f16": (GgmlType.F16, Kind.F16),
    "bf16": (GgmlType.BF16, Kind.BF16),
    "q4_0": (GgmlType.Q4_0, Kind.W4),
    "q4_1": (GgmlType.Q4_1, Kind.W4),
    "q5_0": (GgmlType.Q5_0, Kind.W5),
    "q5_1": (GgmlType.Q5_1, Kind.W5),
    "q8_0": (GgmlType.Q8_0, Kind.W8),
    "q4_k": (GgmlType.Q4_K, Kind.K4),
    "q5_k": (GgmlType.Q5_K, Kind.K5),
    "q6_k": (GgmlType.Q6_K, Kind.K6),
}
FLOATS = ("f32", "f16", "bf16")
SUPER = ("q4_k", "q5_k", "q6_k")


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    """Every level, but for those that this processor lacks."""
    level: Isa = request.param
    if level not in levels():
        pytest.skip(f"this processor has no {level.name}")
    return level


def stored(name: str, rows: int, cols: int) -> tuple[Rows, Kind]:
    """Random weights in a format. The gguf package reads K-quants but does not write them: those are random bytes."""
    draw = np.random.default_rng(rows * cols)
    source, kind = STORED[name]
    if name in SUPER:
        _, size = BLOCK_LAYOUT[source]
        units = draw.integers(0, 256, (rows, cols // 256, size), dtype=np.uint8)
        scales = (0.001 * (1 + draw.random((rows, cols // 256, 2)))).astype(np.float16).view(np.uint8)
        units[..., (-2 if name == "q6_k" else 0) : (None if name == "q6_k" else 4)] = scales[
            ..., : 2 if name == "q6_k" else 4
        ]
        return Rows.stored(units.reshape(-1), source, rows, cols), kind
    values = draw.normal(size=(rows, cols)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(source)))
    return Rows.stored(np.ascontiguousarray(data).view(np.uint8).reshape(-1), source, rows, cols), kind


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


def shapes(name: str) -> list[tuple[int, int]]:
    if name in SUPER:
        return [(5, 256), (50, 512)]
    return [(5, 32), (16, 96), (50, 576), (131, 160)] + ([(19, 31)] if name in FLOATS else [])


@pytest.mark.parametrize("name", STORED)
def test_products_are_those_of_the_numbers_in_the_file(isa: Isa, name: str) -> None:
    for rows, cols in shapes(name):
        part, kind = stored(name, rows, cols)
        matrix, _arena = packed(part, kind)
        weights = part.floats().astype(np.float64)
        x = np.random.default_rng(1).normal(size=(39, cols)).astype(np.float32) * 3
        x[7] = 0
        bound = 3e-5 * cols**0.5 * max(1.0, float(np.abs(weights).max()) / 4)
        y = product(isa, matrix, x, exact=True)
        np.testing.assert_allclose(y, x.astype(np.float64) @ weights.T, atol=bound, rtol=0)
        if name not in FLOATS:
            q, scale = int8_rows(x)
            near = (q * scale.astype(np.float64)).reshape(x.shape)
            fast = product(isa, matrix, x, exact=False)
            np.testing.assert_allclose(fast, near @ weights.T, atol=bound, rtol=0)
            assert np.abs(fast - y).max() > 0


@pytest.mark.parametrize("name", STORED)
def test_a_row_has_the_same_bits_in_any_company(isa: Isa, name: str) -> None:
    cols = 256 if name in SUPER else 288
    part, kind = stored(name, 83, cols)
    matrix, _arena = packed(part, kind)
    x = np.random.default_rng(2).normal(size=(101, cols)).astype(np.float32)
    for exact in (True, False):
        alone = np.concatenate([product(isa, matrix, x[i : i + 1], exact) for i in range(len(x))])
        for n in (2, 3, 4, 5, 7, 8, 9, 11, 14, 16, 31, 101):
            assert np.array_equal(product(isa, matrix, x[:n], exact), alone[:n])


@pytest.mark.parametrize("name", STORED)
def test_packing_keeps_every_number_and_puts_rows_where_they_belong(isa: Isa, name: str) -> None:
    """Unit rows give back what the gguf package says that the file's bytes stand for."""
    cols = 256 if name in SUPER else 64
    part, kind = stored(name, 37, cols)
    order = np.random.default_rng(3).permutation(37)
    matrix, _arena = packed(part._replace(order=int32s(order)), kind, [36 - i for i in range(37)])
    back = product(isa, matrix, np.eye(cols, dtype=np.float32), exact=True).T
    expected = part.floats()[order][::-1]
    if name in SUPER:  # one rounding more or less of a product of two scales
        np.testing.assert_allclose(back, expected, rtol=0, atol=float(np.abs(expected).max()) * 1e-6)
    else:
        assert np.array_equal(back, expected)


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_floats_become_groups_when_asked(source: str) -> None:
    """8 bits lose at most half a step of a group's greatest; 4 bits less than a straight line from least to most."""
    part, _ = stored(source, 20, 64)
    values, unit = part.floats(), np.eye(64, dtype=np.float32)
    made = [packed(part, kind) for kind in (Kind.W8, Kind.W4)]
    back = [product(levels()[-1], matrix, unit, exact=True).T for matrix, _arena in made]
    assert 0 < np.abs(back[0] - values).max() < np.abs(values).max() / 127 * 0.51
    four = gguf.GGMLQuantizationType.Q4_1
    plain = gguf.quants.dequantize(gguf.quants.quantize(values, four), four)
    assert 0 < np.square(back[1] - values).mean() <= np.square(plain - values).mean() * 1.001


def test_weights_that_are_not_finite_are_found() -> None:
    for name in STORED:
        part, kind = stored(name, 20, 256)
        data = part.bytes.copy()
        unit = BLOCK_LAYOUT[part.kind][1]
        bad = np.float32(np.nan).tobytes() if name == "f32" else b"\xff\xff"
        at = 7 * part.row_bytes + (unit - 2 if name == "q6_k" else 0)
        data[at : at + len(bad)] = np.frombuffer(bad, np.uint8)
        with pytest.raises(ModelError, match="row 7 has numbers that are not finite"):
            packed(part._replace(data=data), kind)


@pytest.mark.parametrize("outside", [-1, 20])
def test_rows_are_packed_inside_of_a_matrix_only(outside: int) -> None:
    for name in STORED:
        part, kind = stored(name, 20, 256)
        with pytest.raises(ModelError, match="a matrix of 20"):
            packed(part, kind, [*range(19), outside])


class Attention:
    """A model of nothing but attention: rows of q, k, v go in by its buffer."""

    def __init__(
        self,
        isa: Isa,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        kind: Kind,
        *,
        window: int = 0,
        cap: float = 0.0,
        slopes: Floats | None = None,
        rotated: int = 0,
        norms: tuple[Floats, Floats] | None = None,
        context: int = 256,
        threads: int = 2,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim, self.size = heads, kv_heads, head_dim, block_size
        self.window, self.cap, self.norms, self.half = window, cap, norms, (rotated or head_dim) // 2
        self.blocks = 2 * -(-context // block_size)
        self.widths = int32s([-(-(heads + 2 * kv_heads) * head_dim // 16) * 16, -(-heads * head_dim // 16) * 16])
        turns = np.outer(np.arange(context), 0.3 ** np.arange(self.half))
        self.angles = np.stack([np.cos(turns), np.sin(turns)]).astype(np.float32)
        self.op = COp(kind=OpKind.ATTEND, source=0, target=1, heads=heads, scale=head_dim**-0.5)
        self.op.window, self.op.cap, self.op.eps = window, cap, 1e-6
        self.slopes = slopes
        if slopes is not None:
            self.op.slopes = slopes.ctypes.data
        if norms is not None:
            self._padded = [np.pad(norm, (0, -len(norm) % 16)) for norm in norms]
            self.op.q_norm, self.op.k_norm = (norm.ctypes.data for norm in self._padded)
        self._tables = CAngles(self.half, self.angles.ctypes.data)
        self.shape = CShape(1, kv_heads, head_dim, self.blocks, block_size, kind, context, 1, threads, isa)
        self.model = library().oct_model_new(
            self.shape, ctypes.addressof(self.op), 1, self.widths.ctypes.data, 2, ctypes.addressof(self._tables), 1
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
        d, group, half = self.head_dim, self.heads // self.kv_heads, self.half
        parts = rows.astype(np.float64).reshape(len(rows), -1, d)
        if self.norms is not None:
            scales = np.concatenate(
                [np.tile(self.norms[0], (self.heads, 1)), np.tile(self.norms[1], (self.kv_heads, 1))]
            )
            heads = parts[:, : self.heads + self.kv_heads]
            normed = heads / np.sqrt(np.square(heads).mean(-1, keepdims=True) + 1e-6) * scales
            parts = np.concatenate([normed, parts[:, self.heads + self.kv_heads :]], axis=1)
        cos, sin = self.angles[:, : len(rows), None, :].astype(np.float64)
        first, second, rest = parts[..., :half], parts[..., half : 2 * half], parts[..., 2 * half :]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
        out = np.empty((len(rows), self.heads, d))
        age = np.arange(len(rows))[:, None] - np.arange(len(rows))
        for h in range(self.heads):
            k, v = turned[:, self.heads + h // group], parts[:, self.heads + self.kv_heads + h // group]
            scores = turned[:, h] @ k.T / d**0.5
            if self.cap:
                scores = self.cap * np.tanh(scores / self.cap)
            if self.slopes is not None:
                scores -= self.slopes[h] * age
            scores[(age < 0) | (age >= (self.window or len(rows)))] = -np.inf
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


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.I8], ids=lambda kind: kind.name)
def test_attention_that_is_not_llamas(isa: Isa, kind: Kind) -> None:
    """Window, soft cap, slopes, heads normed and rotated in part, over more than one segment; alone or split over
    threads."""
    draw = np.random.default_rng(9)
    rows = draw.normal(size=(600, (4 + 2 * 2) * 40)).astype(np.float32)
    norms = (draw.normal(size=40).astype(np.float32), draw.normal(size=40).astype(np.float32))
    slopes = np.array([0.5, 0.01, 0, 0.002], dtype=np.float32)
    found: list[Floats] = []
    for block_size, chunk, threads in ((16, 600, 1), (3, 217, 2), (16, 1, 3)):
        attention = Attention(
            isa, 4, 2, 40, block_size, kind, window=300, cap=5.0, slopes=slopes, rotated=24, norms=norms, context=640,
            threads=threads,
        )  # fmt: skip
        assert library().oct_block_bytes(attention.shape) % block_size == 0
        table = np.random.default_rng(block_size).permutation(attention.blocks).tolist()
        attention.run([(rows[:480], 0, table)])
        out = [attention.run([(rows[at : at + chunk], at, table)]) for at in range(0 if chunk > 1 else 480, 600, chunk)]
        found.append(np.concatenate(out))
        if chunk > 1:
            expected = attention.expected(rows)
            error = float(np.abs(found[-1] - expected).max())
            assert error < {Kind.F32: 1e-5, Kind.BF16: 0.03, Kind.I8: 0.06}[kind]
        attention.close()
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0][480:], found[2])


@pytest.mark.parametrize("heads", [(9, 3, 64), (16, 1, 32), (50, 1, 16), (4, 2, 128), (2, 1, 90)])
def test_bf16_is_near_and_has_the_same_bits_in_any_company(isa: Isa, heads: tuple[int, int, int]) -> None:
    """Decoded, in chunks, beside others, over more than one segment, in blocks of any size; within a bound of fp32."""
    width, length = (heads[0] + 2 * heads[1]) * heads[2], 331
    draw = np.random.default_rng(heads[2])
    rows, others = (draw.normal(size=(length, width)).astype(np.float32) for _ in range(2))
    found: list[Floats] = []
    for block_size, chunk, threads in ((16, length, 1), (32, 1, 2), (6, 50, 1), (5, 45, 2)):
        attention = Attention(isa, *heads, block_size, Kind.BF16, context=336, threads=threads)
        order = np.random.default_rng(block_size).permutation(attention.blocks).tolist()
        mine, theirs = order[: len(order) // 2], order[len(order) // 2 :]
        start = 245 if chunk == 1 else 0
        if start:
            attention.run([(rows[:start], 0, mine)])
        out = [
            attention.run([(others[at : at + chunk], at, theirs), (rows[at : at + chunk], at, mine)])[-chunk:]
            for at in range(start, length - chunk + 1, chunk)
        ]
        found.append(np.concatenate(out))
        assert np.array_equal(found[-1], found[0][start : start + len(found[-1])]), block_size
        error = np.abs(found[-1] - attention.expected(rows)[start : start + len(found[-1])]).max()
        attention.close()
        assert 1e-5 < error < 0.03


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.I8], ids=lambda kind: kind.name)
def test_what_a_block_held_before_is_not_seen(isa: Isa, kind: Kind) -> None:
    """Also where it was no number, and where a tile of positions ends in the middle of the block."""
    rows = np.random.default_rng(3).normal(size=(40, (6 + 2 * 2) * 64)).astype(np.float32)
    attention = Attention(isa, 6, 2, 64, 16, kind)
    fresh = attention.run([(rows[:21], 0, [0, 1])])
    attention.run([(np.full_like(rows[:32], np.nan), 0, [2, 3])])
    assert np.array_equal(attention.run([(rows[:21], 0, [2, 3])]), fresh)
    assert np.isnan(attention.run([(np.full_like(rows[:1], np.nan), 21, [2, 3])])).all()
    attention.close()


def test_a_long_stream_has_the_same_bits_split_over_threads() -> None:
    rows = np.random.default_rng(1).normal(size=(1500, 3 * 32)).astype(np.float32)
    found = []
    for threads in (1, 4):
        attention = Attention(levels()[-1], 1, 1, 32, 16, Kind.BF16, context=1504, threads=threads)
        attention.run([(rows[:-1], 0, list(range(94)))])
        found.append(attention.run([(rows[-1:], 1499, list(range(94)))]))
        attention.close()
    assert np.array_equal(found[0], found[1])


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
