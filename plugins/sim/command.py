"""`octavo sim`: what a policy does, seen in seconds: variants of the configuration against the same requests."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.core.cli import FAILED, MISUSED, ConfigFile, Json, Sets
from octavo.core.trace.read import records
from octavo.core.trace.run import Run
from octavo.plugins.sim import page, picture, traces
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
_BUSY, _CROWDED = 0.85, 1.1


def command(
    *,
    workload: str | None = None,
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
    html: Path | None = None,
    table_: Annotated[bool, Parameter(name="--table", negative=())] = False,
    verify: Annotated[bool, Parameter(negative=())] = False,
    json_: Json = False,
) -> int:
    """Simulate the scheduler and the KV-manager on a virtual clock, and compare policies.

    Parameters
    ----------
    workload
        chat (the default), shared, mix, bursts, tenants or agents
    trace
        requests from a file (own JSONL or Mooncake) or from a run's folder, instead of a workload
    requests
        how many; by default 1000, or all of a trace
    rate
        requests a second; by default as many as keep the executor busy for 85 % of the time, with --table a tenth more
        than it can serve with all slots in use, so that there is something to decide
    slo
        what a request must keep to count as good, in seconds: ttft=0.5,tpot=0.05
    cost
        what a step takes: a file from `octavo calibrate`; by default SmolLM2-135M on one CPU core
    out
        a folder for the events of each variant, as a daemon would write them
    html
        a page of one file: all numbers, their distributions, and each run in the viewer of `octavo trace export`
    table_
        instead of --against: every batching and every chunking policy that is installed, on the workload, by default on
        all of them, as a page of Markdown
    verify
        run the ghost executor, which checks every read of the KV (slow)
    """
    try:
        objectives, costs = Slo.parse(slo) if slo else Slo(), load_cost(cost)
        if table_ and against:
            raise ValueError("--table compares all policies: it takes no --against")
        if table_ and html is not None:
            raise ValueError("--html is for one workload and a few variants: it takes no --table")
        compared = (
            page.compared(config, os.environ, set_ or ())
            if table_
            else variants(config, os.environ, set_ or (), against or ())
        )
        names = list(BUILT_IN) if table_ and workload is None and trace is None else [workload or "chat"]
        sources = [_source(name, trace, requests, rate, seed, costs, compared[0], crowded=table_) for name in names]
    except ValueError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return MISUSED
    console = Console(stderr=True)
    summaries: list[Summary] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="octavo-sim-") as scratch:
        written = out or (None if html is None else Path(scratch))
        if table_ and not json_:
            print(page.HEAD)
        for source in sources:
            folders = [_folder(written, source, variant, len(sources), len(compared)) for variant in compared]
            found = []
            for variant, folder in zip(compared, folders, strict=True):
                run = partial(simulate, variant, source.make(), costs, objectives, verify=verify, out=folder)
                with _progress(console, variant.name, source.requests) as progress:
                    found.append(run(progress=progress))
            rows = [one.summary for one in found]
            _print(source, rows, as_page=table_, as_json=json_)
            summaries += rows
            if html is not None:
                runs = [Run(records(folder)) for folder in folders if folder is not None]
                html.write_text(picture.render(source.title, list(map(picture.Shown, found, runs))), encoding="utf-8")
    took = time.monotonic() - began
    for summary in summaries:
        for why in summary.tripped:
            console.print(f"{summary.variant}: the kernel's own rule took over from {why}", style="bold red")
    done = sum(summary.requests for summary in summaries)
    console.print(f"{done} requests in {took:.1f} s: {done / took:.0f} a second", style="dim")
    return 0 if all(summary.finished for summary in summaries) else FAILED


class _Source(msgspec.Struct, frozen=True):
    name: str
    title: str
    requests: int
    make: Callable[[], Workload]


def _source(
    workload: str, trace: Path | None, requests: int | None, rate: float | None, seed: int, cost: CostModel,
    variant: Variant, *, crowded: bool,
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
        return _Source(trace.name, f"{trace.name}, {many} requests", many, lambda: limited(iter(sessions), many))
    if workload not in BUILT_IN:
        raise ValueError(f"there is no workload {workload!r}; there are {', '.join(BUILT_IN)}")
    make = BUILT_IN[workload]
    many = requests or 1000
    slots = variant.config.scheduler.max_sequences
    pace = rate or (
        _CROWDED * _capacity(make(1.0, seed), cost, slots)
        if crowded
        else _BUSY * _capacity(make(1.0, seed), cost, max(1, slots // 4))
    )
    title = f"{workload}, {many} requests at {pace:.2f} a second, seed {seed}"
    return _Source(workload, title, many, lambda: limited(make(pace, seed), many))


def _at_rate(sessions: list[Session], seconds: float) -> list[Session]:
    """The same order, stretched to last this long."""
    factor = seconds / (sessions[-1].start_s or 1.0)
    return [dataclasses.replace(s, start_s=s.start_s * factor) for s in sessions]


def _capacity(workload: Workload, cost: CostModel, together: int) -> float:
    """Requests a second that the executor can about serve, if so many are in use together and nothing is cached but
    what a session said before."""
    needs = [
        cost.request_s(turn.new_tokens, turn.output, together)
        for session in islice(workload, _SAMPLE)
        for turn in session.turns
    ]
    return len(needs) / sum(needs)


def _folder(out: Path | None, source: _Source, variant: Variant, sources: int, compared: int) -> Path | None:
    """Where the variant's events go: a folder of its own only where there are several."""
    if out is None:
        return None
    folder = out / _file_name(source.name) if sources > 1 else out
    return folder / _file_name(variant.name) if compared > 1 else folder


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", name)


def _print(source: _Source, summaries: list[Summary], *, as_page: bool, as_json: bool) -> None:
    if as_page and not as_json:
        print(page.section(source.name, f"{source.title}.", summaries), flush=True)
    elif as_json:
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
