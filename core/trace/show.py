"""`octavo trace show`: one request's life as text, from the trace files of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.rundir import runs

_COMMON = ("ts_ns", "role", "replica", "generation", "event", "request_id")


def lines(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Every event of a run, file after file. A line cut short by a process's death is left out."""
    for path in sorted(run_dir.glob("trace-*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                try:
                    yield msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError:
                    continue


def request_life(run_dir: Path, request_id: str) -> list[dict[str, Any]]:
    """The events of one request over all actors, in order of time."""
    found = [event for event in lines(run_dir) if event.get("request_id") == request_id]
    return sorted(found, key=lambda event: int(event["ts_ns"]))


def describe(events: list[dict[str, Any]]) -> list[str]:
    """A line an event, with milliseconds since the first."""
    start = int(events[0]["ts_ns"]) if events else 0
    out = []
    for event in events:
        fields = " ".join(_field(key, value) for key, value in event.items() if key not in _COMMON)
        offset = (int(event["ts_ns"]) - start) / 1e6
        out.append(
            f"{offset:+10.2f} ms  {event['role']:<9}  {event['event'].removeprefix('request.'):<11}  {fields}".rstrip()
        )
    return out


def _field(key: str, value: Any) -> str:
    """Durations in milliseconds; moments are left as they are."""
    if key.endswith("_ns") and isinstance(value, int) and key != "received_ns":
        return f"{key.removesuffix('_ns')}={value / 1e6:.2f}ms"
    return f"{key}={value}"


def command(request_id: str, run: Path | None) -> int:
    """Print a request's life; 1 if there is no such run or request."""
    if run is None:
        newest = next(iter(runs()), None)
        if newest is None:
            print("octavo: no run found", file=sys.stderr)
            return 1
        run = newest.path
    events = request_life(run, request_id)
    if not events:
        print(f"octavo: request {request_id} is not in the trace of {run}", file=sys.stderr)
        return 1
    print("\n".join(describe(events)))
    return 0
