"""`octavo trace otlp`: sends a run's requests as spans to an OpenTelemetry collector."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from octavo.core.rundir import read
from octavo.core.trace.catalogue import TraceOpened
from octavo.core.trace.read import NoSuchRun, find, records
from octavo.core.trace.run import Run
from octavo.plugins.otel.spans import Span, attributes, spans

BATCH = 512
"""Spans sent at a time."""
PATIENCE_S = 10


def command(
    *,
    to: str = "http://127.0.0.1:4318",
    run: Annotated[Path | None, Parameter(name="--run", help="a run folder; by default the newest one")] = None,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"), help="write the JSON here, and send nothing")] = None,
) -> int:
    """Send a run's requests as spans over OTLP/HTTP, for Jaeger, Tempo and whatever else takes OpenTelemetry.

    Parameters
    ----------
    to
        the collector's address; /v1/traces is added
    """
    try:
        path = find(run)
    except NoSuchRun as error:
        return _failed(str(error))
    indexed = Run(records(path))
    opened = next((line for line in indexed.lines if isinstance(line.event, TraceOpened)), None)
    if opened is None or not isinstance(opened.event, TraceOpened):
        return _failed(f"the trace of {path} does not say what time it was: it is of an older version")
    info = read(path)
    found = spans(indexed, info.model if info is not None else "octavo", opened.event.wall_ns - opened.ts_ns)
    if out is not None:
        out.write_bytes(msgspec.json.encode(document(found)))
        return 0
    sent = 0
    try:
        for batch in _batches(found):
            _post(f"{to.rstrip('/')}/v1/traces", msgspec.json.encode(document(batch)))
            sent += len(batch)
    except (urllib.error.URLError, TimeoutError) as error:
        return _failed(f"{to} took {sent} spans and then failed: {error}")
    print(f"{sent} spans of {len(indexed.requests)} requests")
    return 0


def document(found: Iterable[Span]) -> dict[str, Any]:
    """An ExportTraceServiceRequest."""
    about = attributes({"service.name": "octavo"})
    scope = {"name": "octavo.trace"}
    return {
        "resourceSpans": [
            {"resource": {"attributes": about}, "scopeSpans": [{"scope": scope, "spans": list(found)}]},
        ]
    }


def _batches(found: Iterator[Span]) -> Iterator[list[Span]]:
    while batch := list(islice(found, BATCH)):
        yield batch


def _post(url: str, body: bytes) -> None:
    if not url.startswith(("http://", "https://")):
        raise urllib.error.URLError(f"{url} is not an http address")
    asked = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        answer.read()


def _failed(why: str) -> int:
    print(f"octavo: {why}", file=sys.stderr)
    return 1
