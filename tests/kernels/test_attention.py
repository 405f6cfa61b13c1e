"""Attention kernels against fp64 torch on the emulator: thread orders, late copies, NaN where nothing was written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS, attention_instance
from octavo.kernels.cuda.launch import Step
from octavo.kernels.cuda.plan import ROUND, Query, plan
from tests.kernels.bench import BOTH, DECODES, PREFILLS, WGMMAS, WIDTHS, Case, run, wide
from tests.kernels.conftest import Maker
from tests.kernels.conftest import made as kernels_of

ORDERS = (0, 1, 2, 3, 7)


def close(out: Tensor, expected: Tensor) -> None:
    """Weights are rounded to 16 bits once and results once more; fp32 in between."""
    step = torch.finfo(out.dtype).eps
    assert ((out.double() - expected).abs() <= step * (1.0 + expected.abs())).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", DECODES)
def test_decode(kernels: Maker, name: str, order: int) -> None:
    close(*run(kernels(order), DECODES[name], DECODE_ROWS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(kernels: Maker, name: str, order: int) -> None:
    close(*run(kernels(order), PREFILLS[name], PREFILL_ROWS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", WGMMAS)
def test_prefill_by_warpgroups(warpgroups: Maker, name: str, order: int) -> None:
    close(*run(warpgroups(order), WGMMAS[name], WGMMA_ROWS))


def test_warpgroups_are_asked_where_they_can_serve() -> None:
    """Elsewhere long chunks have mma.sync."""
    hopper, older = kernels_of(Emulator()), kernels_of(Emulator(bulk=False))
    plain, fp8, odd = Case(((1, 1),)), Case(((1, 1),), kv_dtype=torch.float8_e4m3fn), Case(((1, 1),), head_dim=112)
    assert hopper.rows(plain.spec) == (DECODE_ROWS, PREFILL_ROWS, WGMMA_ROWS)
    assert older.rows(plain.spec) == hopper.rows(fp8.spec) == hopper.rows(odd.spec) == (DECODE_ROWS, PREFILL_ROWS)
    for case in (fp8, odd):
        with pytest.raises(
            ValueError, match="needs heads of a multiple of 64, or of 16 or 32 more, and KV as queries are"
        ):
            attention_instance(case.spec, WGMMA_ROWS, bulk=True, shared_limit=1 << 18)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_head_sizes(kernels: Maker, head_dim: int, kind: str) -> None:
    close(*run(kernels(1), wide(head_dim), BOTH[kind]))


def test_a_split_stays_where_it_is_as_a_sequence_grows() -> None:
    """What was a whole part of a context stays one, and company changes no request's work."""
    for length in range(1, 200):
        made = plan([Query(0, 0, 1, length)], 4, DECODE_ROWS, split=64)
        ranges = [(int(work[4]), int(work[5])) for work in made.works]
        assert ranges == [(at, min(at + 64, length)) for at in range(0, length, 64)]
        crowd = plan([Query(0, 1, 1, 99), Query(1, 0, 1, length)], 4, DECODE_ROWS, split=64)
        assert [(int(work[4]), int(work[5])) for work in crowd.works if work[0] == 1] == ranges


def test_what_is_alone_is_cut_alike_within_a_window(kernels: Maker) -> None:
    """Works that begin with a round: a token's numbers do not depend on who is before it in its chunk."""
    spec = Case(((1, 200),), dtype=torch.float16, kv_dtype=torch.float16, window=60).spec
    kv, q = torch.randn(2, spec.layout.blocks * 16, 2, 64), torch.randn(200, 4, 64).half()
    pool, tables, made = spec.layout.pack(kv), torch.arange(spec.layout.blocks).int().unsqueeze(0), kernels(1)

    def attended(first: int, n: int) -> torch.Tensor:
        step = Step(torch.arange(first, first + n).int(), torch.empty(0), torch.arange(n).int(), tables)
        staged = made.stage(plan([Query(0, 0, n, first + n)], 2, DECODE_ROWS, 512, 60, ROUND), 2, 64)
        out = torch.empty(n, 4, 64).half()
        made.attention(spec, step, staged, q[first : first + n].contiguous(), pool, out)
        return out

    whole = attended(0, 200)
    assert all(torch.equal(attended(at, 1)[0], whole[at]) for at in range(60, 200))


@pytest.mark.parametrize("window", [0, 1, 20])
def test_work_covers_every_row_and_every_key_that_it_sees(window: int) -> None:
    queries = [Query(0, 0, 70, 100), Query(1, 70, 1, 33), Query(2, 71, 5, 5)]
    made = plan(queries, 3, PREFILL_ROWS, split=48, window=window)
    for query in queries:
        for row in range(query.tokens * 3):
            position = query.length - query.tokens + row // 3
            seen = [
                key
                for table, _, first, end, key0, key_end, _, _ in made.works.tolist()
                if table == query.table and first <= row < end
                for key in range(key0, key_end)
            ]
            assert len(seen) == len(set(seen))
            assert set(range(max(0, position + 1 - window) if window else 0, position + 1)) <= set(seen)
    parts = [int(work[6]) for work in made.works if work[6] >= 0]
    assert parts == list(range(made.parts))
    assert sorted(p for m in made.merges for p in range(m[3], m[3] + m[4])) == parts
