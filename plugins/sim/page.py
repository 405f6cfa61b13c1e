"""Every batching and every chunking policy on the workloads, as a page of Markdown: what `octavo sim --table` writes.

A policy that is installed is in it, also one of another package. Knows nothing of how the numbers come about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import linesep
from pathlib import Path
from typing import NamedTuple

from octavo.core.plugins import installed
from octavo.plugins.sim.report import seconds
from octavo.plugins.sim.simulate import Variant
from octavo.plugins.sim.summary import Summary
from octavo.plugins.sim.variants import variants

GROUPS = ("batching", "chunking")
HEAD = """# Every batching and chunking policy in the simulator

A row is what one policy did beside the configured ones of the other groups; the configured one of its own group has a
star. Bold is the best of a column where they differ; policies that did all the same share a row. `good` is the share of
requests that kept the objectives (`--slo`), `in time` that of those with a deadline, `service gap` the largest
difference of service between two tenants that both waited, in tokens.
"""


class Column(NamedTuple):
    """A number of each row: how it is shown, and by which key the best one (the least) is found."""

    title: str
    show: Callable[[Summary], str]
    key: Callable[[Summary], float]


def _time(title: str, spread: str, part: str) -> Column:
    def key(summary: Summary) -> float:
        found = getattr(summary, spread)
        return float("inf") if found is None else float(getattr(found, part))

    return Column(title, lambda s: seconds(getattr(s, spread), part), key)


COLUMNS = (
    _time("TTFT p50", "ttft", "p50"),
    _time("TTFT p99", "ttft", "p99"),
    _time("ITL p99", "itl", "p99"),
    _time("TPOT p50", "tpot", "p50"),
    _time("E2E mean", "e2e", "mean"),
    _time("E2E p99", "e2e", "p99"),
    Column("requests/s", lambda s: f"{s.requests_per_s:.2f}", lambda s: -s.requests_per_s),
    Column("good", lambda s: f"{s.kept:.0%}", lambda s: -s.kept),
    Column("in time", lambda s: "–" if s.in_time is None else f"{s.in_time:.0%}", lambda s: -(s.in_time or 0.0)),
    Column("Jain", lambda s: f"{s.jain:.3f}", lambda s: -s.jain),
    Column("service gap", lambda s: str(s.gap), lambda s: s.gap),
    Column("hit rate", lambda s: f"{s.hit_rate:.0%}", lambda s: -s.hit_rate),
)


def compared(file: Path | None, environ: Mapping[str, str], sets: Sequence[str]) -> list[Variant]:
    """A variant for each policy of `GROUPS`, the configured ones of the other groups beside it; named by group and
    policy. Raises `ConfigError`."""
    found: list[Variant] = []
    (base,) = variants(file, environ, sets, [])
    for group in GROUPS:
        usual = getattr(base.config.policies, group)
        for name in installed(f"octavo.{group}"):
            if name == usual:
                config = base.config
            else:
                (config,) = (v.config for v in variants(file, environ, [*sets, f"policies.{group}={name}"], []))
            found.append(Variant(f"{group} {name}{' *' if name == usual else ''}", config))
    return found


def section(title: str, about: str, rows: Sequence[Summary]) -> str:
    """One workload: what it is, and a table; the best of each column in bold where they differ, and policies that did
    all the same in one row."""
    return linesep.join([f"## {title}", "", about, "", *_table(rows), ""])


def _table(rows: Sequence[Summary]) -> Iterator[str]:
    yield "| policy | " + " | ".join(column.title for column in COLUMNS) + " |"
    yield "|---|" + "---:|" * len(COLUMNS)
    same: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        group, name = row.variant.split(" ", 1)
        same.setdefault((group, *(column.show(row) for column in COLUMNS)), []).append(name)
    best = [_best(column, rows) for column in COLUMNS]
    for (group, *cells), names in same.items():
        shown = (f"**{cell}**" if cell == least else cell for cell, least in zip(cells, best, strict=True))
        yield f"| {group} {', '.join(names)} | " + " | ".join(shown) + " |"


def _best(column: Column, rows: Sequence[Summary]) -> str | None:
    """As it is shown; None if all show the same."""
    shown = {column.show(row) for row in rows}
    return column.show(min(rows, key=column.key)) if len(shown) > 1 else None
