"""`octavo top`: a running daemon, live in a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from octavo.core.control import Status
from octavo.core.rundir import RunInfo, find_run
from octavo.core.supervisor.status import ask

COLOURS = {"ready": "green", "starting": "yellow", "down": "red", "degraded": "red", "draining": "yellow"}
BAR_WIDTH = 40


def command(
    *,
    run: Annotated[
        Path | None, Parameter(name="--run", help="a daemon's run folder; by default the newest one")
    ] = None,
    every: Annotated[float, Parameter(help="seconds between two looks")] = 1.0,
    once: Annotated[bool, Parameter(negative=(), help="print one picture and end")] = False,
) -> int:
    """Watch a running daemon until Ctrl-C: its actors, its sequences and its KV pool."""
    info = find_run(run)
    if info is None:
        print(f"octavo: no daemon {'is running' if run is None else f'runs in {run}'}", file=sys.stderr)
        return 1
    view = View(info)
    with Live(view.draw(ask(info)), auto_refresh=False, screen=not once) as live:
        while not once and info.alive():
            time.sleep(every)
            try:
                live.update(view.draw(ask(info)), refresh=True)
            except KeyboardInterrupt:
                break
    return 0


class View:
    """Pictures of one daemon; remembers the last one, to tell how fast things go."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._steps: tuple[float, int] | None = None

    def draw(self, status: Status | None) -> RenderableType:
        title = f"{self._info.model} at {self._info.address or self._info.run_dir}"
        if status is None:
            return Panel("the daemon does not answer", title=title, border_style="red")
        stats = {actor.role: actor.stats for actor in status.actors}
        state = Text(status.state, style=COLOURS.get(status.state, ""))
        parts = [state, self._sequences(stats.get("scheduler", {}), stats.get("executor", {}))]
        return Panel(Group(*parts, _pool(stats.get("kv", {})), _actors(status)), title=title)

    def _sequences(self, scheduler: dict[str, int], executor: dict[str, int]) -> RenderableType:
        now, steps = time.monotonic(), executor.get("steps", 0)
        rate = ""
        if self._steps is not None and now > self._steps[0] and steps >= self._steps[1]:
            rate = f"   {(steps - self._steps[1]) / (now - self._steps[0]):.1f} steps/s"
        self._steps = (now, steps)
        numbers = ((name, scheduler.get(name, 0)) for name in ("running", "waiting", "preemptions"))
        return Text("   ".join(f"{name} {count}" for name, count in numbers) + rate, style="bold")


def _pool(kv: dict[str, int]) -> RenderableType:
    total, free, used = (kv.get(f"{name}_blocks", 0) for name in ("total", "free", "used"))
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, total), completed=used, width=BAR_WIDTH)
    table.add_row("KV blocks", bar, f"{used} used, {total - free - used} cached, {free} free of {total}")
    return table


def _actors(status: Status) -> Table:
    table = Table("actor", "pid", "generation", "state", "restarts", "last progress", box=None, header_style="dim")
    for actor in status.actors:
        age = "" if actor.progress_age_s is None else f"{actor.progress_age_s:.1f} s ago"
        state = Text(actor.state, style=COLOURS.get(actor.state, ""))
        table.add_row(actor.role, str(actor.pid or "-"), str(actor.generation), state, str(actor.restarts), age)
    return table
