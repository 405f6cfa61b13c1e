"""`octavo calibrate`: what a step costs on this machine, from the trace of a run, for `octavo sim --cost`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from octavo.core.cli import FAILED
from octavo.core.trace.read import NoSuchRun, find, lines
from octavo.plugins.roofline.machine import machine as measured
from octavo.plugins.sim.cost import CostFile
from octavo.plugins.sim.fit import TERMS, FitError, fit


def command(
    run: Path | None = None,
    /,
    *,
    out: Path | None = None,
    machine: Annotated[bool, Parameter(name="--machine", negative=())] = False,
) -> int:
    """Fit the simulator's cost model to a run of a real executor.

    Parameters
    ----------
    run
        the folder of a run, finished or not; by default the newest one
    out
        write the model here; without it, it is printed
    machine
        first measure what this machine can do at best, for `octavo roofline`
    """
    if machine:
        print(measured(again=True).told, file=sys.stderr)
    try:
        folder = find(run)
        fitted = fit(lines(folder), folder.name)
    except (NoSuchRun, FitError) as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    document = msgspec.json.format(msgspec.json.encode(fitted), indent=2)
    if out is None:
        print(document.decode())
    else:
        out.write_bytes(document + b"\n")
    print(describe(fitted), file=sys.stderr)
    return 0


def describe(fitted: CostFile) -> str:
    """The model and how far it is off, in words."""
    cost = fitted.cost
    terms = ", ".join(f"{term} {price * 1e6:.4g} µs" for term in TERMS if (price := getattr(cost, term)) is not None)
    hops = ", ".join(
        f"{hop} {getattr(cost, hop) * 1e6:.0f} µs"
        for hop in ("to_kv", "to_executor", "between", "to_scheduler", "to_client")
    )
    return (
        f"{fitted.steps} steps of {fitted.source}: {terms}; {hops}\n"
        f"a step's prediction is off by {fitted.mean_error:.1%} on average, {fitted.p90_error:.1%} at p90; "
        f"all together by {fitted.bias:+.1%}"
    )
