"""`octavo sim`: what a policy does, seen in seconds: variants of the configuration against the same requests."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.core.cli import FAILED, MISUSED, ConfigFile, Json, Sets
from octavo.plugins.sim import traces
from octavo.plugins.sim.cost import CostModel, load_cost
from octavo.plugins.sim.metrics import Slo
from octavo.plugins.sim.report import table
from octavo.plugins.sim.simulate import Variant, simulate
from octavo.plugins.sim.summary import Summary
from octavo.plugins.sim.variants import variants
from octavo.plugins.sim.workload import BUILT_IN, Session, Workload, limited

Against = Annotated[
    list[str] | None, Parameter(name="--against", negative=(), help="another variant: a name or a=b,c=d")
]
_SAMPLE = 500
_BUSY = 0.85


def command(
    *,
    workload: str = "chat",
    trace: Path | None = None,
    config: ConfigFile = None,
    set_: Sets = None,
    against: Against = None,
    requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    slo: str = "",
    cost: Path | None = None,
    out: Path | None = None,
    verify: Annotated[bool, Parameter(negative=())] = False,
    json_: Json = False,
) -> int:
    """Simulate the scheduler and the KV-manager on a virtual clock, and compare policies.

    Parameters
    ----------
    workload
        chat, shared, mix, bursts, tenants or agents
    trace
        requests from a file (own JSONL or Mooncake) or from a run's folder, instead of a workload
    requests
        how many; by default 1000, or all of a trace
    rate
        requests a second; by default as many as keep the executor busy for 85 % of the time
    slo
        what a request must keep to count as good, in seconds: ttft=0.5,tpot=0.05
    cost
        what a step takes: a file from `octavo calibrate`; by default SmolLM2-135M on one CPU core
    out
        a folder for the events of each variant, as a daemon would write them
    verify
        run the ghost executor, which checks every read of the KV (slow)
    """
    try:
        objectives, costs = Slo.parse(slo) if slo else Slo(), load_cost(cost)
        compared = variants(config, os.environ, set_ or (), against or ())
        source = _source(workload, trace, requests, rate, seed, costs, compared[0])
    except ValueError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return MISUSED
    console = Console(stderr=True)
    summaries = []
    began = time.monotonic()
    for variant in compared:
        folder = None if out is None else out / _file_name(variant.name) if len(compared) > 1 else out
        with _progress(console, variant.name, source.requests) as progress:
            summaries.append(
                simulate(variant, source.make(), costs, objectives, verify=verify, out=folder, progress=progress)
            )
    took = time.monotonic() - began
    _print(source, summaries, json_)
    for summary in summaries:
        for why in summary.tripped:
            console.print(f"{summary.variant}: the kernel's own rule took over from {why}", style="bold red")
    done = sum(summary.requests for summary in summaries)
    console.print(f"{done} requests in {took:.1f} s: {done / took:.0f} a second", style="dim")
    return 0 if all(summary.finished for summary in summaries) else FAILED


class _Source(msgspec.Struct, frozen=True):
    title: str
    requests: int
    make: Callable[[], Workload]


def _source(
    workload: str, trace: Path | None, requests: int | None, rate: float | None, seed: int, cost: CostModel,
    variant: Variant,
) -> _Source:  # fmt: skip
    """Raises ValueError."""
    for name, value in (("--requests", requests), ("--rate", rate)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} {value}: must be above 0")
    if trace is not None:
        sessions = traces.load(trace)
        turns = sum(len(session.turns) for session in sessions)
        if rate is not None:
            sessions = _at_rate(sessions, turns / rate)
        many = min(requests or turns, turns)
        return _Source(f"{trace.name}, {many} requests", many, lambda: limited(iter(sessions), many))
    if workload not in BUILT_IN:
        raise ValueError(f"there is no workload {workload!r}; there are {', '.join(BUILT_IN)}")
    make = BUILT_IN[workload]
    many = requests or 1000
    pace = rate or _BUSY * _capacity(make(1.0, seed), cost, variant)
    title = f"{workload}, {many} requests at {pace:.2f} a second, seed {seed}"
    return _Source(title, many, lambda: limited(make(pace, seed), many))


def _at_rate(sessions: list[Session], seconds: float) -> list[Session]:
    """The same order, stretched to last this long."""
    factor = seconds / (sessions[-1].start_s or 1.0)
    return [dataclasses.replace(s, start_s=s.start_s * factor) for s in sessions]


def _capacity(workload: Workload, cost: CostModel, variant: Variant) -> float:
    """Requests a second that the executor can about serve, if a quarter of the slots is in use and nothing is cached
    but what a session said before."""
    together = max(1, variant.config.scheduler.max_sequences // 4)
    needs = [
        cost.request_s(turn.new_tokens, turn.output, together)
        for session in islice(workload, _SAMPLE)
        for turn in session.turns
    ]
    return len(needs) / sum(needs)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", name)


def _print(source: _Source, summaries: list[Summary], as_json: bool) -> None:
    if as_json:
        document = {"workload": source.title, "variants": summaries}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        Console().print(table(source.title, summaries))


@contextmanager
def _progress(console: Console, name: str, requests: int) -> Iterator[Callable[[int], Any]]:
    count = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=requests)
        yield lambda finished: bar.update(task, completed=finished)
