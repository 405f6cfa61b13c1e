"""The arithmetic of reports, as laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.plugins.sim.metrics import Service, Slo, jain, speeds, spread, tpot

seconds = st.floats(0.0, 1e6)
several = st.lists(seconds, min_size=1, max_size=20)


@given(several)
def test_a_spread_lies_between_the_extremes_in_order(values: list[float]) -> None:
    found = spread(np.array(values))
    assert found is not None
    assert found.count == len(values)
    low, high = min(values), max(values)
    for a, b in zip((low, found.p50, found.p90, found.p99), (found.p50, found.p90, found.p99, high), strict=True):
        assert a <= b or math.isclose(a, b)
    assert low <= found.mean or math.isclose(low, found.mean)


@given(several, st.randoms())
def test_a_spread_knows_no_order_and_no_missing_numbers(values: list[float], rng: object) -> None:
    shuffled = [*values, math.nan]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = spread(np.array(values)), spread(np.array(shuffled))
    assert one is not None
    assert other is not None
    assert (one.count, one.p50, one.p99) == (other.count, other.p50, other.p99)


def test_nothing_has_no_spread() -> None:
    assert spread(np.array([])) is None
    assert spread(np.array([math.nan])) is None


@given(st.lists(st.tuples(seconds, seconds, st.integers(1, 1000)), min_size=1, max_size=30))
def test_tpot_times_its_tokens_is_the_time_after_the_first(rows: list[tuple[float, float, int]]) -> None:
    first = np.array([row[0] for row in rows])
    last = first + np.array([row[1] for row in rows])
    tokens = np.array([row[2] for row in rows], dtype=np.int64)
    found = tpot(first, last, tokens)
    for i, n in enumerate(tokens.tolist()):
        if n == 1:
            assert math.isnan(found[i])
        else:
            assert math.isclose(found[i] * (n - 1), last[i] - first[i], rel_tol=1e-9, abs_tol=1e-9)


@given(several)
def test_jain_lies_between_one_nth_and_one_and_is_one_for_equals(values: list[float]) -> None:
    index = jain(np.array(values))
    assert 1 / len(values) - 1e-9 <= index <= 1 + 1e-9
    assert math.isclose(jain(np.full(len(values), 3.5)), 1.0)
    assert math.isclose(jain(np.array([7.0] + [0.0] * (len(values) - 1))), 1 / len(values))


@given(several, st.floats(1e-3, 1e3))
def test_jain_knows_no_unit(values: list[float], factor: float) -> None:
    assert math.isclose(jain(np.array(values) * factor), jain(np.array(values)), rel_tol=1e-6)


@given(several, st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_a_stricter_objective_never_finds_more_good_requests(values: list[float], a: float, b: float) -> None:
    times = np.array(values)
    none = np.full(len(values), math.nan)
    strict = Slo(ttft=min(a, b)).kept(times, none, times)
    loose = Slo(ttft=max(a, b)).kept(times, none, times)
    assert not (strict & ~loose).any()
    assert Slo().kept(times, none, times).all()


def test_an_unserved_request_keeps_nothing_and_one_token_keeps_any_tpot() -> None:
    nan = math.nan
    kept = Slo(ttft=1.0, tpot=0.1).kept(np.array([nan, 0.5, 0.5]), np.array([nan, nan, 0.2]), np.array([nan, 0.5, 2.0]))
    assert kept.tolist() == [False, True, False]
    assert Slo().kept(np.array([nan]), np.array([nan]), np.array([nan])).tolist() == [False]


def test_objectives_are_read_and_mistakes_are_named() -> None:
    assert Slo.parse("ttft=0.5, tpot=0.05") == Slo(ttft=0.5, tpot=0.05)
    wrong = {"ttf=1": "ttft, tpot, e2e", "ttft=soon": "'soon'", "ttft=-1": "above 0", "ttft=nan": "above 0"}
    for text, what in wrong.items():
        with pytest.raises(ValueError, match=what):
            Slo.parse(text)


def test_the_gap_counts_only_while_both_wait_and_idling_earns_nothing() -> None:
    service = Service()
    a, b = service.tenant(), service.tenant()
    one = np.ones(1, dtype=np.int64)
    service.waits(a)
    service.serve(a * one, 100 * one)
    assert service.gap == 0  # nobody else waited
    service.waits(b)  # starts from a's counter
    service.serve(a * one, 10 * one)
    assert service.gap == 10
    service.serve(b * one, 15 * one)
    assert service.gap == 10
    service.leaves(a)
    service.serve(b * one, 500 * one)
    assert service.gap == 10
    service.leaves(b)
    service.waits(a)  # from where b was, though nobody waits
    service.waits(b)
    service.serve(a * one, 3 * one)
    assert service.gap == 10


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50), st.floats(0.1, 100)), min_size=1, max_size=20))
def test_speed_does_not_depend_on_how_much_a_tenant_asks(rows: list[tuple[int, int, float]]) -> None:
    tenant, tokens, e2e = (np.array(column) for column in zip(*rows, strict=True))
    once = speeds(tenant, tokens, e2e)
    assert len(once) == len(set(tenant.tolist()))
    more = speeds(np.tile(tenant, 3), np.tile(tokens, 3), np.append(np.tile(e2e, 3)[:-1], e2e[-1]))
    np.testing.assert_allclose(more, once)
    assert len(speeds(tenant, tokens, np.full(len(rows), math.nan))) == 0


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 50)), max_size=60))
def test_fair_shares_keep_the_gap_below_one_helping(served: list[tuple[int, int]]) -> None:
    """Who always serves the tenant with the least has a gap of at most the largest helping."""
    service, most = Service(), 0
    tenants = [service.tenant() for _ in range(12)]
    for tenant in tenants:
        service.waits(tenant)
    counters = [0] * 12
    for _, tokens in served:
        least = counters.index(min(counters))
        counters[least] += tokens
        service.serve(np.array([least]), np.array([tokens]))
        most = max(most, tokens)
    assert service.gap <= most
