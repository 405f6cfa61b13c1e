"""`octavo roofline`: what bounded the steps of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from octavo.core.cli import FAILED
from octavo.core.models.locate import locate
from octavo.core.rundir import read_config
from octavo.core.trace.read import NoSuchRun, find, records
from octavo.core.trace.run import Run
from octavo.plugins.memory.shape import read_shape
from octavo.plugins.roofline import draw
from octavo.plugins.roofline.bound import costs, points, ran_on
from octavo.plugins.roofline.machine import machine


def command(
    *,
    run: Annotated[Path | None, Parameter(name="--run", help="a run folder; by default the newest one")] = None,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"), help="an .svg or .html file to write")] = None,
    gflops: float | None = None,
    gbytes: float | None = None,
    again: Annotated[bool, Parameter(name="--again", negative=())] = False,
) -> int:
    """Show what bounded each step of a run: arithmetic, memory traffic, room for a larger batch, or scheduling.

    Parameters
    ----------
    gflops
        the peak of what the run was on, in GFLOP/s; without it, this machine's processors are measured (once)
    gbytes
        its memory bandwidth, in GB/s
    again
        measure this machine again
    """
    try:
        path = find(run)
    except NoSuchRun as error:
        return _failed(str(error))
    indexed = Run(records(path))
    kind, block_bytes = ran_on(indexed)
    config = read_config(path)
    if kind in ("", "ghost"):
        return _failed(f"{path} ran on {kind or 'no executor'}, which computes nothing")
    if kind == "cuda" and (gflops is None or gbytes is None):
        return _failed("a GPU's peak is not measured here: give --gflops and --gbytes")
    best = machine(again=again)
    if gflops is not None and gbytes is not None:
        best = msgspec.structs.replace(best, flops=gflops * 1e9, bytes=gbytes * 1e9, source="as given")
    files = locate(config.model.path)
    steps = list(points(indexed, costs(read_shape(files), kind, block_bytes, config.kv.block_size), best))
    if not steps:
        return _failed(f"the trace of {path} has no step that computed anything")
    print("\n".join(draw.table(steps, best)))
    if out is not None:
        picture = draw.svg(steps, best, f"{files.model_id} on {kind}")
        page = f"<!doctype html><meta charset=utf-8><title>octavo roofline</title>{picture}"
        out.write_text(page if out.suffix == ".html" else picture, encoding="utf-8")
    return 0


def _failed(why: str) -> int:
    print(f"octavo: {why}", file=sys.stderr)
    return FAILED
