"""What a shadow has found so far: a file of the run folder that its process writes, and its text for people."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.policy.load import METHODS
from octavo.core.rundir import process_birth

FIRST = 3
"""Differences of each kind, and bad answers, that are kept in words."""
STALE_S = 5.0
REPORT_S = 0.5
"""How often one that runs writes down what it has found."""
BEGIN_S = 10.0
POLL_S = 0.02


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A difference in words."""

    kind: str
    asked: str
    live: str
    mine: str


class Findings(msgspec.Struct, kw_only=True):
    """Times are (median, 99th percentile, most) of the latest calls, µs; `started` and `updated` seconds since the
    epoch. `different` calls of `calls` differ, in `kinds`; `invalid` ones had no valid answer to compare. With
    `tripped` the candidate would have been switched off, and is not asked any more. `asking_s` is how long it has been
    at its present call."""

    group: str
    policy: str
    options: dict[str, Any]
    budget_us: int
    started: float
    updated: float = 0.0
    pid: int = msgspec.field(default_factory=os.getpid)
    birth: int = msgspec.field(default_factory=lambda: process_birth(os.getpid()) or 0)
    beside: str = ""
    calls: int = 0
    dropped: int = 0
    different: int = 0
    kinds: dict[str, int] = {}
    invalid: int = 0
    first_invalid: list[str] = []
    tripped: str = ""
    asking_s: float = 0.0
    spent_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    live_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    first: list[Seen] = []

    @property
    def running(self) -> bool:
        return process_birth(self.pid) == self.birth


def write(run_dir: Path, findings: Findings) -> None:
    """Whole or not at all: readers look at any time."""
    scratch = run_dir / f"shadow-{findings.group}.new"
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(findings)))
    scratch.replace(_path(run_dir, findings.group))


def read_all(run_dir: Path) -> list[Findings]:
    """Of the shadows that run or ran last, a group each."""
    found = []
    for group in METHODS:
        try:
            found.append(msgspec.json.decode(_path(run_dir, group).read_bytes(), type=Findings))
        except FileNotFoundError:
            continue
    return found


def read_fresh(run_dir: Path) -> list[Findings]:
    """The same up to now: what a shadow was told lately is in its next report. One that can say nothing any more is not
    waited for."""
    asked, until = time.time(), time.monotonic() + 2 * REPORT_S
    while True:
        found = read_all(run_dir)
        if all(one.updated >= asked or not one.running for one in found) or time.monotonic() > until:
            return found
        time.sleep(POLL_S)


def begun(run_dir: Path, group: str, asked: float) -> bool:
    """Wait until the shadow that was asked for at `asked` (in seconds since the epoch) listens; False if it does not
    begin. The one before it may have reported until it ended."""
    until = time.monotonic() + BEGIN_S
    while not any(one.group == group and one.started >= asked for one in read_all(run_dir)):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def forget(run_dir: Path, group: str) -> None:
    """Another shadow begins."""
    _path(run_dir, group).unlink(missing_ok=True)


def _path(run_dir: Path, group: str) -> Path:
    return run_dir / f"shadow-{group}.json"


def text(found: Findings) -> str:
    return "\n".join(_lines(found))


def _lines(found: Findings) -> Iterator[str]:
    options = "".join(f" {key}={value}" for key, value in found.options.items())
    if not found.running:
        state = "has ended"
    elif found.asking_s > 1:
        state = f"has not answered for {found.asking_s:.0f} s: live, it would have been switched off by a restart"
    elif time.time() - found.updated > STALE_S:
        state = f"has said nothing for {time.time() - found.updated:.0f} s: it hangs and lets no other thread run"
    else:
        state = "runs"
    yield f"{found.group}: {found.policy}{options} in the shadow of {found.beside or '(no call yet)'}"
    yield f"  process {found.pid}, {found.updated - found.started:.0f} s: {state}"
    yield f"  calls        {found.calls}" + (f", {found.dropped} more dropped: it was behind" if found.dropped else "")
    if found.calls:
        compared = found.calls - found.invalid
        yield f"  same         {compared - found.different} ({_percent(compared - found.different, compared)})"
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.kinds.items(), key=lambda kv: -kv[1]))
        yield f"  different    {found.different}" + (f": {kinds}" if kinds else "")
        yield f"  not valid    {found.invalid}"
        for why in found.first_invalid:
            yield f"               {why}"
        for name, (median, p99, most) in ((found.policy, found.spent_us), (found.beside, found.live_us)):
            yield f"  µs a call    {median:.0f} median, {p99:.0f} p99, {most:.0f} most ({name})"
        if found.spent_us[0] > found.budget_us:
            yield f"               policies.call_budget_us is {found.budget_us}: live, it would be switched off"
    if found.tripped:
        yield f"  live, it would have been switched off, so it is not asked any more: {found.tripped}"
    width = max(len(found.policy), len(found.beside))
    for kind in dict.fromkeys(one.kind for one in found.first):
        yield f"  first differences ({kind})"
        for one in found.first:
            if one.kind == kind:
                yield f"    {one.asked}"
                yield f"      {found.beside:{width}}  {one.live}"
                yield f"      {found.policy:{width}}  {one.mine}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
