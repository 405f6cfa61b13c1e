"""A cost model is found again in the steps that it made, and a real run's is written so that it can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.work import Work
from octavo.plugins.sim.cost import CostFile, CostModel, load_cost
from octavo.plugins.sim.fit import TERMS, FitError, fit, solve

coefficients = st.floats(1e-9, 1e-2)


def works(count: int, seed: int = 0) -> list[Work]:
    rng = np.random.default_rng(seed)
    return [
        Work(
            prefill_tokens=int(rng.integers(0, 500)) * int(rng.random() < 0.5),
            decodes=int(rng.integers(1, 60)),
            attention=int(rng.integers(1, 100_000)),
            kv_tokens=int(rng.integers(1, 10_000)),
            copied=int(rng.integers(0, 50)),
            guesses=int(rng.integers(0, 20)),
        )
        for _ in range(count)
    ]


def executed(step: int, work: Work, ns: int) -> dict[str, Any]:
    fixed = {"event": "step.executed", "step": step, "rows": 1, "tokens": 1, "started_ns": step * 10**9}
    return {**fixed, "execute_ns": ns, **work._asdict()}


def columns(one: Work) -> list[int]:
    """In the order of `TERMS`."""
    return [1, one.prefill_tokens, one.decodes, one.attention, one.kv_tokens, one.copied, one.guesses]


@given(st.tuples(*[coefficients] * len(TERMS)))
@settings(deadline=None, max_examples=30)
def test_the_model_that_made_the_steps_is_found(made: tuple[float, ...]) -> None:
    model = CostModel(**dict(zip(TERMS, made, strict=True)))
    work = np.array([columns(one) for one in works(200)], dtype=np.float64)
    seconds = np.array([model.duration_s(one) for one in works(200)])
    found = solve(work, seconds)
    assert (found >= 0).all()
    np.testing.assert_allclose(work @ found, seconds, rtol=1e-6)


def test_a_term_that_never_occurs_costs_nothing_and_none_is_negative() -> None:
    work = np.array([[1, 0, n, 0, n * 10] for n in range(1, 40)], dtype=np.float64)
    falling = 1.0 / np.arange(1, 40)  # no linear model: the more work, the faster
    found = solve(work, falling)
    assert found[1] == found[3] == 0
    assert (found >= 0).all()


def test_a_fit_says_how_far_it_is_off() -> None:
    rng = np.random.default_rng(1)
    model = CostModel()
    exact = [executed(i, work, round(model.duration_s(work) * 1e9)) for i, work in enumerate(works(300))]
    noisy = [{**event, "execute_ns": round(event["execute_ns"] * rng.uniform(0.7, 1.3))} for event in exact]
    assert fit(exact, "x").mean_error < 1e-3
    assert 0.10 < fit(noisy, "x").mean_error < 0.20  # a uniform ±30 % is 15 % on average


def test_a_run_that_copied_nothing_leaves_the_price_of_a_copy_as_it_was() -> None:
    model = CostModel(copied_block=1.0)
    idle = [work._replace(copied=0) for work in works(100)]
    priced = fit([executed(i, work, round(model.duration_s(work) * 1e9)) for i, work in enumerate(works(100))], "x")
    unknown = fit([executed(i, work, round(model.duration_s(work) * 1e9)) for i, work in enumerate(idle)], "x")
    assert priced.cost.copied_block == pytest.approx(1.0, rel=1e-3)
    assert unknown.cost.copied_block == CostModel().copied_block


def test_a_run_without_guesses_prices_them_as_decodes() -> None:
    model = CostModel(decode=1e-3, guess=5e-3)
    quiet = [work._replace(guesses=0) for work in works(100)]
    priced, unknown = (
        fit([executed(i, work, round(model.duration_s(work) * 1e9)) for i, work in enumerate(run)], "x").cost
        for run in (works(100), quiet)
    )
    assert (priced.decode, priced.guess) == pytest.approx((1e-3, 5e-3), rel=1e-3)
    assert unknown.decode == pytest.approx(1e-3, rel=1e-3)
    assert unknown.guess is None
    assert unknown.duration_s(Work(0, 2, 0, 0, guesses=3)) == pytest.approx(unknown.step + 5 * unknown.decode)


def test_hops_are_means_of_the_way() -> None:
    """A bind that waited for the executor says nothing of its hop."""
    events: list[dict[str, Any]] = []
    at = 0
    for step, work in enumerate(works(40)):
        busy = step % 2 == 1  # bound while the step before still runs
        planned = at - 700_000 if busy else at + 5_000_000
        bound = planned + 300_000
        started = at + 100_000 if busy else bound + 200_000
        events.append({"event": "step.planned", "step": step, "ts_ns": planned})
        events.append({"event": "step.bound", "step": step, "ts_ns": bound})
        events.append({**executed(step, work, 2_000_000), "started_ns": started})
        at = started + 2_000_000
        events.append({"event": "step.completed", "step": step, "ts_ns": at + 400_000})
    cost = fit(events, "x").cost
    assert (cost.to_kv, cost.to_executor, cost.between, cost.to_scheduler) == pytest.approx((3e-4, 2e-4, 1e-4, 4e-4))


def test_a_run_without_load_cannot_be_fitted() -> None:
    with pytest.raises(FitError, match="3 steps with work in its trace, at least 20"):
        fit([executed(i, work, 10**6) for i, work in enumerate(works(3))], "run")


def test_a_model_is_read_as_it_was_written_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    cost = CostModel(step=0.5, decode=0.25)
    file.write_bytes(msgspec.json.encode(CostFile(cost=cost, steps=9)))
    assert load_cost(file) == cost
    assert load_cost(None) == CostModel()
    file.write_text('{"cost": {"step": -1}}')
    with pytest.raises(ValueError, match=r"cost.json is not what `octavo calibrate` writes.*\$.cost.step"):
        load_cost(file)
    with pytest.raises(ValueError, match="No such file"):
        load_cost(tmp_path / "none.json")
