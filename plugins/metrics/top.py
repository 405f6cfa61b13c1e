"""`octavo top`: a running daemon, live in a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from octavo.core.rundir import RunInfo, find_run, none_runs
from octavo.core.supervisor.status import ask
from octavo.plugins.metrics.live import Figures, Live, Percentiles, Pool

COLOURS = {"ready": "green", "starting": "yellow", "down": "red", "degraded": "red", "draining": "yellow"}
BAR_WIDTH = 44
USED, CACHED, FREE = "█", "▒", "·"
SHOWN_TENANTS = 6
LEVELS = "▁▂▃▄▅▆▇█"
LINE_WIDTH = 60


def command(
    *,
    run: Annotated[
        Path | None, Parameter(name="--run", help="a daemon's run folder; by default the newest one")
    ] = None,
    every: Annotated[float, Parameter(help="seconds between two looks")] = 1.0,
    once: Annotated[bool, Parameter(negative=(), help="print one picture and end")] = False,
) -> int:
    """Watch a running daemon until Ctrl-C: processes, sequences, latencies, the KV pool and the policies."""
    info = find_run(run)
    if info is None:
        print(f"octavo: {none_runs(run)}", file=sys.stderr)
        return 1
    live = Live(info)
    if once:
        Console().print(_look(live, info))
        return 0
    with Screen(_look(live, info), auto_refresh=False, screen=True) as screen:
        try:
            while info.alive():
                time.sleep(every)
                screen.update(_look(live, info), refresh=True)
        except KeyboardInterrupt:
            pass
    return 0


def _look(live: Live, info: RunInfo) -> RenderableType:
    status = ask(info)
    return silent(info) if status is None else draw(live.look(status))


def silent(info: RunInfo) -> RenderableType:
    """The picture of a daemon that does not answer."""
    return Panel("the daemon does not answer", title=info.model, border_style="red")


def draw(figures: Figures) -> RenderableType:
    """One picture."""
    state = Text(figures.state, style=COLOURS.get(figures.state, ""))
    notes = [Text(note, style="dim") for note in figures.notes]
    parts = [state, *notes, _sequences(figures), _line(figures), _pool(figures.pool), _latencies(figures)]
    parts += [_policies(figures), _processes(figures)]
    return Panel(Group(*parts), title=f"{figures.model} at {figures.address}")


def _sequences(figures: Figures) -> RenderableType:
    numbers = [
        f"running {figures.running}",
        f"waiting {figures.waiting}",
        f"preemptions {figures.preemptions}",
        *([f"{figures.tokens_per_s:.0f} tokens/s"] if figures.tokens_per_s is not None else []),
        *([f"{figures.steps_per_s:.1f} steps/s"] if figures.steps_per_s is not None else []),
        *([f"cache hits {figures.hit_rate:.0%}"] if figures.hit_rate is not None else []),
        *([f"accepted {figures.acceptance:.0%}"] if figures.acceptance is not None else []),
    ]
    return Text("   ".join(numbers), style="bold")


def _line(figures: Figures) -> RenderableType:
    """Tokens per second at the last looks."""
    rates = [rate for rate, _, _ in figures.history][-LINE_WIDTH:]
    most = max(rates, default=0.0)
    marks = "".join(LEVELS[round(rate / most * (len(LEVELS) - 1))] for rate in rates) if most else ""
    return Text(f"tokens/s  {marks}  at most {most:.0f}", style="green") if marks else Text("")


def _pool(pool: Pool) -> RenderableType:
    total = max(1, pool.total)
    used, cached = round(BAR_WIDTH * pool.used / total), round(BAR_WIDTH * pool.cached / total)
    free = max(0, BAR_WIDTH - used - cached)
    bar = Text.assemble((USED * used, "red"), (CACHED * cached, "cyan"), (FREE * free, "dim"))
    table = Table.grid(padding=(0, 2))
    told = f"{pool.used} used, {pool.cached} cached, {pool.free} free of {pool.total}"
    table.add_row("KV blocks", bar, told)
    most = max((blocks for _, blocks in pool.tenants), default=1)
    for tenant, blocks in pool.tenants[:SHOWN_TENANTS]:
        share = Text(CACHED * max(1, round(BAR_WIDTH * blocks / total)), style="cyan" if blocks == most else "blue")
        table.add_row(f"  {tenant}", share, f"{blocks} in the prefix tree")
    return table


def _latencies(figures: Figures) -> Table:
    table = Table("ms", "p50", "p90", "p99", f"of the last {figures.window_s:.0f} s", box=None, header_style="dim")
    for name, found in figures.latencies.items():
        table.add_row(name.upper(), *_milliseconds(found), f"{found.count} choices")
    return table


def _milliseconds(found: Percentiles) -> tuple[str, str, str]:
    if not found.count:
        return ("-", "-", "-")
    return (f"{found.p50:.1f}", f"{found.p90:.1f}", f"{found.p99:.1f}")


def _policies(figures: Figures) -> Table:
    table = Table("policy", "", "calls", "µs each", "not valid", "", box=None, header_style="dim")
    for one in figures.policies:
        state = Text("switched off", style="red") if one.tripped else Text("")
        table.add_row(one.group, one.name, str(one.calls), f"{one.mean_us:.0f}", str(one.rejected), state)
    return table


def _processes(figures: Figures) -> Table:
    table = Table(
        "process", "pid", "generation", "state", "restarts", "last progress", "memory", box=None, header_style="dim"
    )
    for one in figures.processes:
        age = "" if one.progress_age_s is None else f"{one.progress_age_s:.1f} s ago"
        state = Text(one.state, style=COLOURS.get(one.state, ""))
        memory = "" if one.resident is None else f"{one.resident / 2**20:.0f} MiB"
        table.add_row(one.role, str(one.pid or "-"), str(one.generation), state, str(one.restarts), age, memory)
    return table
