"""Four policies on a real executor and in the simulator: the ranks agree wherever the real gaps exceed the noise.

All of it happens in one run of one daemon: the policies take turns, the same requests again and again, so that what
else the machine does falls on all of them; the cost model is fitted to that very run. Takes minutes, so it is behind
`--sim-real KIND`, the executor to use, and writes `tests/results/simulator.md`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations
from math import log
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from octavo.core.control import SetPolicy
from octavo.core.supervisor.status import tell
from octavo.core.trace.read import lines
from octavo.plugins.sim.calibrate import describe
from octavo.plugins.sim.cost import CostModel
from octavo.plugins.sim.fit import fit
from octavo.plugins.sim.metrics import Floats, Slo, tpot
from octavo.plugins.sim.simulate import simulate
from octavo.plugins.sim.variants import variants
from octavo.plugins.sim.workload import Segment, Session, Turn
from tests.processes.daemon import daemon, eventually
from tests.sim.drive import Row, drive

ROUNDS, REQUESTS, VOCAB = 4, 16, 40_000
SETS = (
    "kv.tokens=8192", "kv.block_size=16", "kv.prefix_cache=false", "scheduler.max_sequences=4",
    "scheduler.chunk_budget=128", "scheduler.tell_every_ms=20", "policies.speculation=off",
)  # fmt: skip
POLICIES = {
    "fcfs, decode-first": ("fcfs", "decode-first"),
    "shortest, decode-first": ("shortest", "decode-first"),
    "static, decode-first": ("static", "decode-first"),
    "fcfs, fair-share": ("fcfs", "fair-share"),
}
OPTIONS = {"static": {"size": 4}}


def sessions() -> list[Session]:
    """Half of them short (prompt 24, answer 8, in the median), half long (160 and 32), lognormal, within a second."""
    rng = np.random.default_rng(2)
    made = []
    for i, start in enumerate(np.sort(rng.uniform(0, 1, REQUESTS)).tolist()):
        prompt, output = ((24, 8), (160, 32))[i % 2]
        lengths = [max(4, round(float(rng.lognormal(np.log(median), 0.3)))) for median in (prompt, output)]
        made.append(Session(start, (Turn((Segment(500 + i, lengths[0]),), lengths[1]),)))
    return made


class Play(NamedTuple):
    """What one play of the requests took, in seconds."""

    ttft: Floats
    tpot: Floats
    e2e: Floats

    @classmethod
    def of(cls, rows: list[Row]) -> Play:
        sent, first, last, tokens = np.array(rows).T
        return cls(first - sent, tpot(first, last, tokens.astype(np.int64)), last - sent)


class Measure(NamedTuple):
    name: str
    of: Callable[[Play], float]
    """Of a play."""


def p99(values: Floats) -> float:
    return float(np.nanpercentile(values, 99))


MEASURES = (
    Measure("mean TTFT", lambda play: float(play.ttft.mean())),
    Measure("p99 TTFT", lambda play: p99(play.ttft)),
    Measure("mean TPOT", lambda play: float(np.nanmean(play.tpot))),
    Measure("p99 TPOT", lambda play: p99(play.tpot)),
    Measure("mean E2E", lambda play: float(play.e2e.mean())),
)


class Finding(NamedTuple):
    """One number of one pair of policies."""

    measure: str
    pair: str
    real: float
    """Ratio of the two, measured: the median over rounds."""
    low: float
    high: float
    noise: float
    """Half of what one policy's own plays differed by, of the noisier one: the log of a ratio."""
    foretold: float

    @property
    def clear(self) -> bool:
        """The same one was ahead in every round, and by more than the noise."""
        return (self.low > 1 or self.high < 1) and abs(log(self.real)) > self.noise

    @property
    def agrees(self) -> bool:
        return (self.real > 1) == (self.foretold > 1)


@pytest.mark.timeout(3600)
def test_ranks_agree_with_a_real_executor(request: pytest.FixtureRequest, root: Path) -> None:
    kind = request.config.getoption("--sim-real")
    if not kind:
        pytest.skip("takes minutes: --sim-real native (or cpu)")
    real: dict[str, list[Play]] = {name: [] for name in POLICIES}
    with daemon(*SETS, f"executor.kind={kind}", model="default") as service:
        service.wait_ready()
        drive(service.run_dir, sessions()[:4], VOCAB)  # the first steps load what later ones need
        for _ in range(ROUNDS):
            for name, (batching, chunking) in POLICIES.items():
                for group, policy in (("batching", batching), ("chunking", chunking)):
                    tell(service.info(), SetPolicy(group=group, name=policy, options=OPTIONS.get(policy, {})))
                real[name].append(Play.of(drive(service.run_dir, sessions(), VOCAB)))
        asked = ROUNDS * len(POLICIES) * REQUESTS
        eventually("the trace is written", lambda: len(service.events("request.delivered")) >= asked + 4)
        fitted = fit(lines(service.run_dir), f"a run of executor.kind={kind}")
    foretold = {name: simulated(batching, chunking, fitted.cost) for name, (batching, chunking) in POLICIES.items()}
    found = [compare(measure, *pair, real, foretold) for measure in MEASURES for pair in combinations(POLICIES, 2)]
    text = report(kind, describe(fitted), real, foretold, found)
    (root / "tests" / "results" / "simulator.md").write_text(text, encoding="utf-8")
    clear = [one for one in found if one.clear]
    assert len(clear) >= 3, text
    assert all(one.agrees for one in clear), text


def simulated(batching: str, chunking: str, cost: CostModel) -> Play:
    policies = [f"policies.batching={batching}", f"policies.chunking={chunking}"]
    options = [f"policies.options.batching.{key}={value}" for key, value in OPTIONS.get(batching, {}).items()]
    (variant,) = variants(None, {}, [*SETS, *policies, *options], [])
    times = simulate(variant, iter(sessions()), cost, Slo()).times
    return Play(times.ttft, times.tpot, times.e2e)


def compare(measure: Measure, one: str, other: str, real: dict[str, list[Play]], foretold: dict[str, Play]) -> Finding:
    """Round by round, since a round's plays followed each other."""
    values = {name: [measure.of(play) for play in real[name]] for name in (one, other)}
    ratios = [a / b for a, b in zip(values[one], values[other], strict=True)]
    return Finding(
        measure.name,
        f"{one} ÷ {other}",
        float(np.median(ratios)),
        min(ratios),
        max(ratios),
        max(log(max(own) / min(own)) / 2 for own in values.values()),
        measure.of(foretold[one]) / measure.of(foretold[other]),
    )


def report(kind: str, model: str, real: dict[str, list[Play]], foretold: dict[str, Play], found: list[Finding]) -> str:
    text = [
        "# The simulator against a real executor",
        "",
        f"`pytest tests/sim/test_ranks.py --sim-real {kind}`: SmolLM2-135M on executor.kind={kind}, {ROUNDS} rounds of",
        f"{len(POLICIES)} policies that take turns in one daemon, {REQUESTS} requests each. Load of the machine:",
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. The cost model is fitted to the same run; beside it the",
        "simulator knows only the requests.",
        "",
        *model.splitlines(),
        "",
        "## Prediction",
        "",
        "Measured: the median over rounds, the least and the most. Error: what is foretold against that median.",
        "",
        "| policies | number | measured | least to most | foretold | error |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, plays in real.items():
        for measure in MEASURES:
            values = [measure.of(play) for play in plays]
            middle, told = float(np.median(values)), measure.of(foretold[name])
            spread = f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}"
            row = f"| {name} | {measure.name} | {middle * 1e3:.1f} ms | {spread} "
            text.append(f"{row}| {told * 1e3:.1f} ms | {told / middle - 1:+.0%} |")
    clear = [one for one in found if one.clear]
    text += [
        "",
        "## Ranks",
        "",
        "A pair is clear if the same one was ahead in every round, by more than half of what either differed by from",
        f"round to round: {len(clear)} of {len(found)} are. The simulator has the same one ahead in",
        f"{sum(one.agrees for one in clear)} of these.",
        "",
        "| number | pair | measured | least to most | foretold | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for one in found:
        verdict = ("agrees" if one.agrees else "DIFFERS") if one.clear else "within the noise"
        text.append(
            f"| {one.measure} | {one.pair} | {one.real:.2f} | {one.low:.2f} to {one.high:.2f} | {one.foretold:.2f} | "
            f"{verdict} |"
        )
    return "\n".join([*text, ""])
