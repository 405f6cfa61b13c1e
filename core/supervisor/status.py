"""`octavo status`: asks the running supervisor how its actors are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import zmq

from octavo.core import control, wire
from octavo.core.control import ActorStatus, AskStatus, SetPolicy, SetShadow, Status
from octavo.core.rundir import RunInfo, find_run, none_runs
from octavo.core.supervisor.child import UNDER_WAY

PATIENCE_MS = 3000


def ask(run: RunInfo) -> Status | None:
    """The supervisor's answer; None if it does not give one in time."""
    return tell(run, AskStatus())


def tell(run: RunInfo, message: AskStatus | SetPolicy | SetShadow) -> Status | None:
    """Say something to the supervisor that it answers with its status."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(wire.control_endpoint(run.path))
        socket.send(control.encode(message))
        if not socket.poll(PATIENCE_MS):
            return None
        answer = control.decode_to_member(socket.recv())
        return answer if isinstance(answer, Status) else None


def command(run: Path | None, as_json: bool) -> int:
    """Print a line (or an object) an actor; 1 if no daemon answers."""
    info = find_run(run)
    if info is None:
        print(f"octavo: {none_runs(run)}", file=sys.stderr)
        return 1
    status = ask(info)
    if status is None:
        print(f"octavo: the daemon (pid {info.pid}, {info.run_dir}) does not answer", file=sys.stderr)
        return 1
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(status.actors)).decode())
    else:
        print(f"{info.model} at {info.address or info.run_dir}: {status.state}")
        print(os.linesep.join([*table(status.actors), *status.notes]))
    return 0


def table(actors: list[ActorStatus]) -> list[str]:
    """Aligned lines of text; of the numbers only those that say something."""
    rows = [("actor", "pid", "generation", "state", "restarts", "last progress", "")]
    for actor in actors:
        age = "-" if actor.progress_age_s is None else f"{actor.progress_age_s:.1f} s ago"
        stats = " ".join(f"{key}={value}" for key, value in actor.stats.items() if value or key in UNDER_WAY)
        rows.append(
            (actor.role, str(actor.pid or "-"), str(actor.generation), actor.state, str(actor.restarts), age, stats)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
