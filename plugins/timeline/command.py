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
from octavo.plugins.timeline import chrome, page


def export(
    *,
    run: Annotated[Path | None, Parameter(name="--run", help="a run folder; by default the newest one")] = None,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"), help="the file to write")] = None,
    html: Annotated[bool, Parameter(name="--html", negative=())] = False,
) -> int:
    """Write the timeline of a run: for ui.perfetto.dev, or as one HTML page that needs nothing else.

    Parameters
    ----------
    html
        write the page, not the Perfetto file
    """
    try:
        path = find(run)
    except NoSuchRun as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    target = out or Path("octavo-trace.html" if html else "octavo-trace.json")
    indexed, about = Run(records(path)), _about(path)
    if html:
        target.write_text(page.render(indexed, about), encoding="utf-8")
    else:
        target.write_bytes(msgspec.json.encode(chrome.document(indexed, about)))
    print(f"{target}: {len(indexed.steps)} steps, {len(indexed.requests)} requests")
    return 0


def _about(path: Path) -> dict[str, str]:
    info = read(path)
    return {"run": path.name, "model": info.model if info is not None else ""}
