"""Which cores may compute here, and how many threads: as many as there are cores that this process may use, and no more
than its CPU quota pays for.

Beyond a quota every thread is stopped for the rest of the period, so a step would take a tenth of a second now and
then. Linux's control groups, version 2 and 1: a container sees its own limits at the root, a service those of its
parents too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.core.models.errors import ModelError

CGROUPS = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """At least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), int(quota(CGROUPS, _own()))))


def keep_to(cores: Sequence[int]) -> None:
    """This thread and those that it starts from now on run on these only. Raises `ModelError` for one that the process
    may not use."""
    if not cores:
        return
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - allowed):
        raise ModelError(
            f"executor.cores has core {missing[0]}, which this process may not use; it may use {sorted(allowed)}"
        )
    os.sched_setaffinity(0, cores)


def quota(root: Path, own: str) -> float:
    """The least quota, in cores, of the group `own` and those above it; a huge number if there is none."""
    inner = Path(own.lstrip("/"))
    groups = [root / parent for parent in (inner, *inner.parents)]
    groups += [root / "cpu" / parent for parent in (inner, *inner.parents)]
    return min((limit for group in groups for limit in _limits(group)), default=1e6)


def _limits(group: Path) -> Iterator[float]:
    try:
        if (two := group / "cpu.max").is_file():
            spent, period = two.read_text().split()
        elif (one := group / "cpu.cfs_quota_us").is_file():
            spent, period = one.read_text().strip(), (group / "cpu.cfs_period_us").read_text().strip()
        else:
            return
        if spent not in ("max", "-1"):
            yield int(spent) / int(period)
    except (OSError, ValueError):  # a system that keeps it otherwise: no limit that we know of
        return


def _own() -> str:
    """This process's group: `0::/path` of version 2, or the line of the controller `cpu`."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return "/"
    found = {controllers: path for _, controllers, path in lines}
    return next((path for names, path in found.items() if "cpu" in names.split(",")), found.get("", "/"))
