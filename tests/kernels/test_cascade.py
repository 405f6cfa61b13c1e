"""Sequences that share their first blocks: the shared keys are read once, every row gets what it would alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.executors.cuda.batch import attention_plans, build
from octavo.executors.residents import Span
from octavo.kernels.cuda import reference
from octavo.kernels.cuda.cascade import Group, cascade, fitting_cascade, groups
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS
from octavo.kernels.cuda.launch import Kernels, Step
from octavo.kernels.cuda.plan import Ints, Plan, Query, plan
from tests.kernels.bench import Case
from tests.kernels.conftest import Maker
from tests.kernels.test_attention import close

BLOCK = 16
SPLIT = 64
CASES = {
    "a group of decodes, and one alone": Case(((1, 150),) * 5 + ((1, 90),)),
    "two groups, sinks, soft cap": Case(((1, 140), (3, 200), (1, 130), (2, 131), (1, 70)), sinks=True, soft_cap=5.0),
    "many more rows than a work has": Case(((1, 100),) * 45, kv_heads=1),
}
"""Sequences of the first table share 128 keys; in the second case the last three share 64 of their own."""


def shared_tables(name: str, case: Case) -> Ints:
    """Block tables with common beginnings; every other block is a sequence's own."""
    widest = max(-(-length // BLOCK) for _, length in case.lengths)
    tables = np.arange(len(case.lengths) * widest, dtype=np.int32).reshape(-1, widest)
    if name.startswith("two groups"):
        tables[:2, :8] = tables[0, :8]
        tables[2:, :4] = tables[2, :4]
    elif name.startswith("many"):
        tables[:, :5] = tables[0, :5]
    else:
        tables[:5, :8] = tables[0, :8]
    return tables


def queries_of(case: Case) -> list[Query]:
    found: list[Query] = []
    for i, (tokens, length) in enumerate(case.lengths):
        found.append(Query(i, sum(query.tokens for query in found), tokens, length))
    return found


def run(kernels: Kernels, name: str, rows: int, shared_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """With a cascade, without, and in fp64."""
    case = CASES[name]
    tables = shared_tables(name, case)
    spec, queries = case.spec, queries_of(case)
    layout = replace(spec.layout, blocks=int(tables.max()) + 1)
    generator = torch.Generator().manual_seed(3)
    tokens = sum(query.tokens for query in queries)
    q = torch.randn(tokens, case.heads, case.head_dim, generator=generator).to(case.dtype)
    kv = torch.full((2, layout.blocks * BLOCK, case.kv_heads, case.head_dim), torch.nan)
    for query in queries:
        n = np.arange(query.length)
        slots = torch.from_numpy(tables[query.table].astype(np.int64)[n // BLOCK] * BLOCK + n % BLOCK)
        missing = slots[kv[0, slots, 0, 0].isnan()]
        kv[:, missing] = torch.randn(2, len(missing), case.kv_heads, case.head_dim, generator=generator)
    pool = layout.pack(kv)
    place = torch.cat([torch.arange(query.length - query.tokens, query.length) for query in queries])
    found = groups(queries, tables, BLOCK, step=SPLIT, least=SPLIT)
    assert len(found) == (2 if name.startswith("two") else 1)
    made = cascade(queries, found, spec.group, rows, shared_rows, SPLIT)
    assert made.shared is not None
    results = []
    for mine in (made, plan(queries, spec.group, rows, SPLIT)):
        step = Step(place.int(), torch.empty(0), torch.arange(tokens).int(), torch.from_numpy(tables))
        staged = kernels.stage(mine, case.kv_heads, case.head_dim)
        out = torch.full_like(q, torch.nan)
        kernels.attention(replace(spec, layout=layout), step, staged, q, pool, out)
        results.append(out)
    expected = reference.attention(
        q, layout.unpack(pool).float(), torch.from_numpy(tables), queries, block_size=BLOCK, scale=spec.scale,
        soft_cap=case.soft_cap, sinks=spec.sinks,
    )  # fmt: skip
    return results[0], results[1], expected


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_for_all_gives_the_same_bits(kernels: Maker, name: str, order: int) -> None:
    """As a mode that promises the same numbers in any company needs it."""
    shared, alone, expected = run(kernels(order), name, DECODE_ROWS, DECODE_ROWS)
    close(shared, expected)
    assert torch.equal(shared, alone)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_shared_keys_go_to_a_kernel_for_many_rows(kernels: Maker, name: str, order: int) -> None:
    shared, _, expected = run(kernels(order), name, DECODE_ROWS, PREFILL_ROWS)
    close(shared, expected)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_shared_keys_go_to_warpgroups(warpgroups: Maker, name: str, order: int) -> None:
    shared, _, expected = run(warpgroups(order), name, DECODE_ROWS, WGMMA_ROWS)
    close(shared, expected)


def seen(made: Plan, rows: dict[tuple[int, int], list[int]]) -> None:
    """Adds each work's keys to those of its rows, by token and head."""
    order = made.order
    assert order is not None
    for _, tokens, row, row_end, key, key_end, _, _ in made.works.tolist():
        for r in range(row, row_end):
            rows.setdefault((int(order[tokens + r // 3]), r % 3), []).extend(range(key, key_end))


@pytest.mark.parametrize("seed", range(8))
def test_every_row_meets_each_of_its_keys_once(seed: int) -> None:
    chance = random.Random(seed)
    queries: list[Query] = []
    tables = np.arange(20 * 12, dtype=np.int32).reshape(20, 12)
    for i in range(20):
        tokens = chance.choice([0, 1, 1, 2, 9])
        queries.append(
            Query(i, sum(query.tokens for query in queries), tokens, tokens + chance.randint(0, 12 * 16 - 9))
        )
        if i and chance.random() < 0.8:
            like, columns = chance.randrange(i), chance.randint(1, 12)
            tables[i, :columns] = tables[like, :columns]
    found = groups(queries, tables, BLOCK, step=BLOCK, least=32)
    members = [i for group in found for i in group.members]
    assert len(members) == len(set(members)) > 0
    for group, keys in found:
        assert keys >= 32
        assert keys <= min(queries[i].length - queries[i].tokens for i in group)
        assert len({tuple(tables[i, : keys // BLOCK]) for i in group}) == 1
    made = cascade(queries, found, 3, DECODE_ROWS, PREFILL_ROWS, 64)
    rows: dict[tuple[int, int], list[int]] = {}
    seen(made, rows)
    assert made.shared is not None
    seen(made.shared, rows)
    for query in queries:
        for r in range(query.tokens * 3):
            keys_of = rows[query.first + r // 3, r % 3]
            assert len(keys_of) == len(set(keys_of))
            assert set(range(query.length - query.tokens + r // 3 + 1)) <= set(keys_of)
    assert all(end - row <= PREFILL_ROWS for _, _, row, end, *_ in made.shared.works.tolist())
    assert sorted(set(made.shared.works[:, 6].tolist())) == list(range(made.shared.parts))


def test_the_groups_that_save_most_are_taken() -> None:
    """Eight that share one block, four of which share ten: ten blocks three times less beat one, seven times."""
    tables = np.arange(8 * 12, dtype=np.int32).reshape(8, 12)
    tables[:, 0] = tables[0, 0]
    tables[:4, :10] = tables[0, :10]
    queries = [Query(i, i, 1, 180) for i in range(8)]
    assert groups(queries, tables, BLOCK, step=16, least=16) == [Group([0, 1, 2, 3], 160)]
    assert groups(queries[3:], tables, BLOCK, step=16, least=16) == [Group([0, 1, 2, 3, 4], 16)]
    assert groups(queries, tables, BLOCK, step=64, least=64) == [Group([0, 1, 2, 3], 128)]
    assert groups(queries, tables, BLOCK, step=16, least=200) == []


@pytest.mark.parametrize(("blocks", "cuts"), [(8, 512), (12, 256), (1, 1024), (100, 128)])
def test_a_cascade_is_cut_as_the_device_is_filled(blocks: int, cuts: int) -> None:
    """Four decodes over 1024 keys, half of them shared, in one work of 64 rows."""
    tables = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
    tables[:, :32] = tables[0, :32]
    queries = [Query(i, i, 1, 1024) for i in range(4)]
    made = fitting_cascade(queries, [Group([0, 1, 2, 3], 512)], 4, DECODE_ROWS, PREFILL_ROWS, blocks)
    longest = max(end - key for _, _, _, _, key, end, _, _ in made.works.tolist())
    assert longest == min(cuts, 512)
    assert made.shared is not None
    assert len(made.works) + len(made.shared.works) == 5 * max(1, 512 // cuts)


def test_steps_share_where_there_is_no_window() -> None:
    """Decodes of one prompt, and a chunk of another: as an executor plans them."""
    table = list(range(40))
    spans = [Span([1], 600 + i, [*table[:33], 50 + 2 * i, 51 + 2 * i, *range(80, 85)]) for i in range(3)]
    batch = build([*spans, Span([1] * 30, 0, [98, 99])], BLOCK)
    for fill, rows in ((0, DECODE_ROWS), (64, WGMMA_ROWS)):
        plans = attention_plans(batch, 4, 2, fill=fill, rows=(DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS))
        assert plans[0].shared is not None
        assert plans[0].shared.rows == rows
        ends = [end for _, _, _, _, _, end, _, _ in plans[0].shared.works.tolist()]
        assert max(ends) == (512 if fill == 0 else 528)
        works = [work for made in plans for work in made.works.tolist()]
        assert {key for _, _, _, _, key, *_ in works} == {0, max(ends)}  # the chunk begins at 0
        windowed = attention_plans(batch, 4, 2, fill=fill, window=4096)
        assert [made.shared for made in windowed] == [None] * len(windowed)


def test_own_tokens_are_never_shared() -> None:
    tables = np.zeros((2, 4), dtype=np.int32)
    assert groups([Query(0, 0, 30, 64), Query(1, 30, 30, 64)], tables, BLOCK, step=16, least=16) == [Group([0, 1], 32)]


def test_each_begins_like_the_next_and_goes_on() -> None:
    """More of them than calls can be nested."""
    n = 1100
    tables = np.arange(n * (n + 1), dtype=np.int32).reshape(n, n + 1)
    for i in range(n):
        tables[i, : i + 1] = tables[-1, : i + 1]
    queries = [Query(i, i, 1, (i + 1) * BLOCK + 1) for i in range(n)]
    ((members, keys),) = groups(queries, tables, BLOCK, step=16, least=16)
    assert members == list(range(n // 2 - 1, n))
    assert keys == n // 2 * BLOCK


def test_a_plan_crosses_over_without_waiting_for_the_device(
    resident_kernels: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the one way that does not wait: whoever waited here would wait for the step before."""
    sent: list[int] = []
    send = Kernels._sent

    def seen(self: Kernels, host: Tensor) -> Tensor:
        sent.append(host.data_ptr())
        return send(self, host)

    monkeypatch.setattr(Kernels, "_sent", seen)
    queries, tables = [Query(i, i, 1, 130) for i in range(3)], np.zeros((3, 9), dtype=np.int32)
    made = cascade(queries, groups(queries, tables, BLOCK, step=SPLIT, least=SPLIT), 2, DECODE_ROWS, DECODE_ROWS, SPLIT)
    assert made.shared is not None
    resident_kernels(0).stage(made, 2, 64)
    arrays = [array for one in (made, made.shared) for array in (one.works, one.merges, one.order) if array is not None]
    assert {torch.from_numpy(array).data_ptr() for array in arrays} <= {*sent}
