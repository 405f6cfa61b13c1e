"""Prediction is checked, not believed: a real model serves, a cost model is fitted to its steps, and the simulator says
what the same requests take, which it has to find from their arrivals alone."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.trace.read import lines
from octavo.plugins.sim.fit import fit
from octavo.plugins.sim.metrics import Slo, Spread, spread, tpot
from octavo.plugins.sim.simulate import simulate
from octavo.plugins.sim.variants import variants
from octavo.plugins.sim.workload import Segment, Session, Turn
from tests.processes.daemon import daemon, eventually
from tests.sim.drive import drive

REQUESTS = 20
VOCAB = 40_000
GROSS = 3.0
"""A machine that others use too is not to be predicted better than by this factor with certainty; what it is, is
printed. On a quiet one it should be 1.1."""
SETS = (
    "executor.threads=1", "kv.tokens=4096", "kv.block_size=16", "scheduler.chunk_budget=128",
    "scheduler.tell_every_ms=20", "policies.speculation=off",
)  # fmt: skip


def sessions(seed: int) -> list[Session]:
    """Poisson, faster than they can be served; prompts lognormal (median 40), answers lognormal (median 12)."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(0.05, REQUESTS))
    prompts = np.clip(rng.lognormal(np.log(40), 0.7, REQUESTS), 4, 200).astype(int)
    outputs = np.clip(rng.lognormal(np.log(12), 0.4, REQUESTS), 4, 24).astype(int)
    return [
        Session(start, (Turn((Segment(seed * 1000 + i, prompt),), output),))
        for i, (start, prompt, output) in enumerate(
            zip(starts.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        )
    ]


def test_the_simulator_foretells_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    with daemon(*SETS, model="default") as service:
        service.wait_ready()
        sent, first, last, tokens = np.array(drive(service.run_dir, sessions(1), VOCAB)).T
        eventually("the trace is written", lambda: len(service.events("request.delivered")) == REQUESTS)
        fitted = fit(lines(service.run_dir), "the run")
    (variant,) = variants(None, {}, SETS, [])
    found = simulate(variant, iter(sessions(1)), fitted.cost, Slo()).summary
    assert found.finished == REQUESTS
    with capsys.disabled():
        print(f"\n  a step: {fitted.mean_error:.0%} off on average, together {fitted.bias:+.0%}")
        per_token = tpot(first, last, tokens.astype(np.int64))
        for name, real, predicted in (
            ("TTFT", spread(first - sent), found.ttft),
            ("TPOT", spread(per_token), found.tpot),
        ):
            assert real is not None
            assert predicted is not None
            print(f"  {name}: mean {_error(real, predicted, 'mean')}, p99 {_error(real, predicted, 'p99')}")
            assert 1 / GROSS < predicted.mean / real.mean < GROSS


def _error(real: Spread, predicted: Spread, what: str) -> str:
    measured, foretold = getattr(real, what), getattr(predicted, what)
    return f"{measured:.3f} s, predicted {foretold:.3f} s ({foretold / measured - 1:+.0%})"
