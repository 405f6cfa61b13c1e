"""`octavo top`: a picture of the figures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from octavo.core import rundir
from octavo.core.config.schema import Config
from octavo.core.rundir import RunInfo
from octavo.plugins.metrics.live import Figures, Percentiles, Policy, Pool, Process
from octavo.plugins.metrics.top import command, draw, silent

INFO = RunInfo(pid=1, birth=1, started=0.0, model="m", address="http://127.0.0.1:1", run_dir="/nowhere")
SOME = Percentiles(7, 1.0, 2.25, 3.0)

FIGURES = Figures(
    model="m",
    address="http://127.0.0.1:1",
    state="degraded",
    notes=["policy x is switched off"],
    window_s=60,
    processes=[
        Process(role=role, pid=7, generation=2, state="ready", restarts=1, progress_age_s=0.5, resident=50 * 2**20)
        for role in ("scheduler", "kv", "executor")
    ],
    running=3,
    waiting=4,
    preemptions=5,
    steps_per_s=1.5,
    tokens_per_s=200.0,
    latencies={"ttft": SOME, "tpot": Percentiles(0, 0.0, 0.0, 0.0)},
    hit_rate=0.25,
    acceptance=0.5,
    pool=Pool(total=100, used=50, cached=30, free=20, tenants=[("acme", 60)]),
    history=[(10.0, 1, 0), (80.0, 3, 4), (0.0, 0, 0)],
    policies=[Policy(group="batching", name="fcfs", calls=9, mean_us=12.3, rejected=1, tripped=True)],
)


def text(picture: RenderableType) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(picture)
    return capture.get()


def test_the_picture_says_what_the_figures_say() -> None:
    shown = text(draw(FIGURES))
    for part in (
        "m at http://127.0.0.1:1",
        "degraded",
        "policy x is switched off",
        "running 3   waiting 4   preemptions 5   200 tokens/s   1.5 steps/s   cache hits 25%   accepted 50%",
        "tokens/s  ▂█▁  at most 80",
        "50 used, 30 cached, 20 free of 100",
        "60 in the prefix tree",
        "switched off",
        "50 MiB",
    ):
        assert part in shown
    assert " ".join(next(line for line in shown.splitlines() if "TTFT" in line).split()[2:6]) == "1.0 2.2 3.0 7"
    assert " ".join(next(line for line in shown.splitlines() if "TPOT" in line).split()[2:5]) == "- - -"
    bar = next(line for line in shown.splitlines() if "KV blocks" in line)
    assert (bar.count("█"), bar.count("▒"), bar.count("·")) == (22, 13, 9)


def test_a_daemon_that_is_silent_is_said_to_be() -> None:
    assert "does not answer" in text(silent(INFO))


def test_without_a_daemon_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run=tmp_path, once=True) == 1
    assert "no daemon runs in" in capsys.readouterr().err


def test_ctrl_c_ends_it_quietly_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = rundir.write(tmp_path, Config(), model="ghost", pid=os.getpid())
    monkeypatch.setattr("octavo.plugins.metrics.top.ask", lambda info: None)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    assert run.alive()
    assert command(run=tmp_path) == 0
