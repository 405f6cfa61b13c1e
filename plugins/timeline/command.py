"""`octavo trace export`: writes a run as a Perfetto file or as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from octavo.core.rundir import read
from octavo.core.trace.read import NoSuchRun, find, records
from octavo.core.trace.run import Run
from octavo.plugins.timeline import beside, chrome, page


def export(
    *,
    run: Annotated[Path | None, Parameter(name="--run", help="a run folder; by default the newest one")] = None,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"), help="the file to write")] = None,
    html: Annotated[bool, Parameter(name="--html", negative=())] = False,
    beside_: Annotated[list[Path] | None, Parameter(name="--beside", negative=())] = None,
) -> int:
    """Write the timeline of a run: for ui.perfetto.dev, or as one HTML page that needs nothing else.

    Parameters
    ----------
    html
        write the page, not the Perfetto file
    beside_
        other runs' folders, to be shown on the same page: the simulated one that `octavo sim --trace RUN --out FOLDER`
        has made of this run, or another daemon's; implies --html
    """
    html = html or bool(beside_)
    try:
        paths = [find(path) for path in (run, *(beside_ or ()))]
    except NoSuchRun as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    target = out or Path("octavo-trace.html" if html else "octavo-trace.json")
    shown = [(Run(records(path)), _about(path)) for path in paths]
    if len(shown) > 1:
        target.write_text(beside.render(shown), encoding="utf-8")
    elif html:
        target.write_text(page.render(*shown[0]), encoding="utf-8")
    else:
        target.write_bytes(msgspec.json.encode(chrome.document(*shown[0])))
    for indexed, about in shown:
        of = f" of {about['run']}" if len(shown) > 1 else ""
        print(f"{target}: {len(indexed.steps)} steps, {len(indexed.requests)} requests{of}")
    return 0


def _about(path: Path) -> dict[str, str]:
    """A simulated run's folder has no daemon's file."""
    info = read(path)
    return {"model": info.model if info is not None else "simulated", "run": path.name}
