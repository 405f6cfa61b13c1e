"""`octavo replay`: are the decisions of a recorded run made again, or what would other policies have decided?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.cli import FAILED, MISUSED, Json, Sets
from octavo.core.config.load import leaves, load
from octavo.core.config.schema import Config
from octavo.core.messages import Role
from octavo.core.rundir import read_config
from octavo.core.trace.record import frames, record_path
from octavo.plugins.sim.replay import Replayed, replay

DIFFERS = 3


def command(run: Path, /, *, set_: Sets = None, json_: Json = False) -> int:
    """Make the scheduler's and the KV-manager's decisions of a run again, from what `trace.record=true` recorded.

    Every message they send must be the recorded one, bit for bit. With --set, the first one that differs is shown. Exit
    code 3: something differs.

    Parameters
    ----------
    run
        the run's folder
    """
    roles = [role for role in (Role.SCHEDULER, Role.KV) if record_path(run, role).exists()]
    if not roles:
        print(f"octavo: {run} has no recording; run the daemon with --set trace.record=true", file=sys.stderr)
        return MISUSED
    try:
        recorded = read_config(run)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"octavo: {run / 'config.json'} cannot be read: {error}", file=sys.stderr)
        return FAILED
    config = load(None, {}, [*settings(recorded), *(set_ or ())]).config if set_ else recorded
    results = [replay(role, frames(record_path(run, role)), config, recorded) for role in roles]
    if json_:
        print(msgspec.json.format(msgspec.json.encode(results), indent=2).decode())
    else:
        sys.stdout.write("".join(f"{line}{os.linesep}" for result in results for line in describe(result)))
    return 0 if all(result.same for result in results) else DIFFERS


def settings(config: Config) -> list[str]:
    """A configuration as `--set` values."""
    return [f"{key}={_toml(value)}" for key, value in leaves(config) if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def describe(result: Replayed) -> Sequence[str]:
    head = f"{result.role}: {result.messages} messages, {result.plans} answers"
    if result.cores > 1:
        head += f", {result.cores} generations"
    if result.lost:
        return [f"{head}, all the same; then {result.lost} are missing, and nothing after them can be replayed"]
    if (difference := result.difference) is None:
        return [f"{head}: all the same, bit for bit"]
    cause = f"message {difference.number} ({difference.message}) at {difference.now_ns} ns"
    lines = [f"{head}: the last one differs, on {cause}"]
    if not difference.recorded:
        return [*lines, "  the recorded policies do not give the recorded answer either; this one is:",
                *(f"    {line}" for line in difference.replayed)]  # fmt: skip
    same = set(difference.recorded) & set(difference.replayed)
    lines += [f"  - {line}" for line in difference.recorded if line not in same]
    lines += [f"  + {line}" for line in difference.replayed if line not in same]
    return lines
