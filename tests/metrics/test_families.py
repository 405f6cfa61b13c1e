"""Prometheus's text format, and what the three kinds of metrics promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.plugins.metrics.families import Counter, Cumulative, Gauge, Histogram, Shares, render


def test_a_page_reads_as_the_format_says() -> None:
    asked = Counter("asked_total", "What was asked.", "how", ("well", "badly"))
    asked.add(2, "badly")
    length = Histogram("length_seconds", "How long.", (0.1, 1))
    for amount in (0.1, 0.5, 7):
        length.observe(amount)
    assert render([asked, length], {"model": 'a "b"\\'}).splitlines() == [
        "# HELP asked_total What was asked.",
        "# TYPE asked_total counter",
        r'asked_total{model="a \"b\"\\",how="well"} 0',
        r'asked_total{model="a \"b\"\\",how="badly"} 2',
        "# HELP length_seconds How long.",
        "# TYPE length_seconds histogram",
        r'length_seconds_bucket{model="a \"b\"\\",le="0.1"} 1',
        r'length_seconds_bucket{model="a \"b\"\\",le="1"} 2',
        r'length_seconds_bucket{model="a \"b\"\\",le="+Inf"} 3',
        r'length_seconds_sum{model="a \"b\"\\"} 7.6',
        r'length_seconds_count{model="a \"b\"\\"} 3',
    ]


def test_a_counter_does_not_shrink() -> None:
    counter = Counter("c_total", "c")
    with pytest.raises(ValueError, match="cannot shrink"):
        counter.add(-1)
    assert counter.total() == 0


@pytest.mark.parametrize("family", [Counter("c", "c", "l", ("a",)), Gauge("g", "g", "l", ("a",))])
def test_a_label_value_must_be_known_beforehand(family: Counter | Gauge) -> None:
    with pytest.raises(KeyError):
        (family.add if isinstance(family, Counter) else family.set)(1, "b")
    assert [sample.labels for sample in family.samples()] == [{"l": "a"}]


def test_label_values_that_come_later_are_bounded() -> None:
    shares = Shares("s_total", "s", "tenant", 2)
    for tenant in ("a", "b", "", "c", "d", "a"):
        shares.add(1, tenant)
    assert {sample.labels["tenant"]: sample.value for sample in shares.samples()} == {
        "": 1, "other": 2, "a": 2, "b": 1
    }  # fmt: skip


def test_a_histogram_of_somebody_else_grows_by_what_is_told() -> None:
    histogram = Cumulative("h", "h", (1, 8))
    histogram.add([1, 2, 0], 9)
    histogram.add([0, 0, 1], 100)
    assert [sample.value for sample in histogram.samples()] == [1, 3, 4, 109, 4]


@given(st.lists(st.floats(0, 100), max_size=50), st.lists(st.floats(0.01, 99), min_size=1, max_size=10, unique=True))
def test_a_histogram_counts_everything_once(amounts: list[float], bounds: list[float]) -> None:
    histogram = Histogram("h", "h", bounds)
    for amount in amounts:
        histogram.observe(amount)
    samples = list(histogram.samples())
    buckets = [sample.value for sample in samples if sample.suffix == "_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[:-1] == [sum(amount <= bound for amount in amounts) for bound in sorted(bounds)]
    assert buckets[-1] == samples[-1].value == histogram.count == len(amounts)
