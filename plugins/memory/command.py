"""`octavo memory`: where a running daemon's memory went, or what a model that is not loaded would take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, RenderableType
from rich.table import Table

from octavo.core.cli import FAILED, MISUSED
from octavo.core.control import Status
from octavo.core.memory import process_memory
from octavo.core.models.locate import locate
from octavo.core.rundir import read
from octavo.core.supervisor.status import ask
from octavo.core.trace.catalogue import KvLeak
from octavo.core.trace.read import Line, NoSuchRun, find, records
from octavo.plugins.memory.calculator import DTYPES, Need, need, parse_size, told
from octavo.plugins.memory.ledger import PARTS, Column, Figure, ledger
from octavo.plugins.memory.shape import Shape, read_shape

MARKS = {"measured": "", "estimated": " ~", "unobservable": "?"}


def command(
    *,
    model: str | None = None,
    context: str | None = None,
    concurrency: int = 1,
    dtype: str = "bf16",
    block_size: int = 16,
    available: str | None = None,
    run: Annotated[Path | None, Parameter(name="--run", help="a run folder; by default the newest one")] = None,
) -> int:
    """Show where a daemon's memory went; or, with --model, what a model that is not loaded would take.

    Parameters
    ----------
    model
        a GGUF file, a model folder or a hub id
    context
        tokens of each sequence (32k); by default what the model was made for
    concurrency
        sequences at a time
    dtype
        numbers of the KV: fp32, bf16, fp16, fp8, int8 or int4
    block_size
        tokens in a KV block
    available
        how much memory there is (24GiB), to tell what fits
    """
    console = Console()
    if model is None:
        return _of_run(console, run)
    try:
        if dtype not in DTYPES:
            raise ValueError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if concurrency < 1 or block_size < 1:
            raise ValueError("--concurrency and --block-size are at least 1")
        memory = None if available is None else parse_size(available)
        wanted = None if context is None else parse_size(context)
    except ValueError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return MISUSED
    shape = read_shape(locate(model))
    length = wanted or shape.context
    if not length:
        print(f"octavo: {shape.name} does not say what context it was made for: give --context", file=sys.stderr)
        return MISUSED
    found = need(shape, context=length, concurrency=concurrency, dtype=dtype, block_size=block_size, memory=memory)
    console.print(calculated(shape, found, length, concurrency, dtype))
    return 0


def calculated(shape: Shape, found: Need, context: int, concurrency: int, dtype: str) -> RenderableType:
    """A table of what the model takes."""
    table = Table(box=None, show_header=False, title=f"{shape.name}: {kinds(shape)}", title_justify="left")
    counted = "as in its files" if shape.counted else "estimated from its shape, in 2 bytes a number"
    table.add_row("weights", told(found.weights), f"{shape.parameters / 1e6:.0f} million numbers, {counted}")
    table.add_row("KV per token", told(found.per_token), f"in {dtype}, of all layers together")
    table.add_row("KV per sequence", told(found.per_sequence), f"of {context} tokens, in whole blocks")
    table.add_row("KV of all", told(found.kv), f"{concurrency} sequences")
    table.add_row(
        "  of it for nobody", told(found.waste), f"in last blocks, on average; at worst {told(found.waste_most)}"
    )
    table.add_row("together", told(found.total), "activations and the runtime come on top")
    if found.fits_tokens is not None:
        table.add_row(
            "fits beside the weights", f"{found.fits_tokens} tokens", f"{found.fits_sequences} such sequences"
        )
    if context > shape.context > 0:
        table.add_row("", "", f"the model was made for {shape.context} tokens")
    return table


def kinds(shape: Shape) -> str:
    """Its layers by what they keep: `30 layers, GQA`, `8 full and 40 with a window of 1024, GQA`."""
    found: dict[str, int] = {}
    for layer in shape.layers:
        what = (
            f"with a window of {layer.window}" if layer.window else {"state": "without KV"}.get(layer.attention, "full")
        )
        found[what] = found.get(what, 0) + 1
    if found.keys() == {"full"}:
        return f"{len(shape.layers)} layers, {shape.sharing}"
    return f"layers: {' and '.join(f'{count} {what}' for what, count in found.items())}, {shape.sharing}"


# ── a daemon ─────────────────────────────────────────────────────────────────────────────────────


def _of_run(console: Console, run: Path | None) -> int:
    try:
        path = find(run)
    except NoSuchRun as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    lines = records(path)
    columns = ledger(lines)
    if not columns:
        print(f"octavo: the trace of {path} has no memory.measured: no executor has loaded", file=sys.stderr)
        return FAILED
    console.print(ledger_table("the executor's host memory", columns, [column.host for column in columns]))
    if any(column.device for column in columns):
        console.print(ledger_table("its device memory", columns, [column.device for column in columns]))
    else:
        console.print("no device: torch has none in use")
    console.print("~ estimated, ? unobservable, everything else measured", style="dim")
    info = read(path)
    if info is not None and info.alive() and (status := ask(info)) is not None:
        console.print(actors_table(status))
    console.print(audit(lines))
    return 0


def ledger_table(title: str, columns: list[Column], parts: list[dict[str, Figure]]) -> Table:
    table = Table("", *(column.moment.replace("_", " ") for column in columns), box=None, title=title)
    table.title_justify = "left"
    for part in PARTS:
        if any(part in one for one in parts):
            table.add_row(part, *(cell(one.get(part)) for one in parts))
    return table


def cell(figure: Figure | None) -> str:
    if figure is None or not figure.how:
        return "-"
    return f"{'' if figure.size is None else told(figure.size)}{MARKS[figure.how]}"


def actors_table(status: Status) -> Table:
    """What each process of a running daemon holds now."""
    table = Table("process", "resident", "its own", "mapped files", "peak", box=None, title="now", title_justify="left")
    for actor in status.actors:
        memory = None if actor.pid is None else process_memory(actor.pid)
        if memory is not None:
            table.add_row(actor.role, *map(told, memory))
    return table


def audit(lines: list[Line]) -> str:
    """What the KV-manager found whenever it was idle: free + cached + in use must be all blocks."""
    leaks = [line.event for line in lines if isinstance(line.event, KvLeak)]
    if not leaks:
        return "KV blocks: whenever nothing was resident, free + cached was all of them"
    last = leaks[-1]
    return (
        f"KV blocks: {len(leaks)} times the accounts did not add up, and were repaired; the last time {last.free} "
        f"free, {last.cached} cached and {last.in_use} in use of {last.total}: {last.dump}"
    )
