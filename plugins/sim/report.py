"""Variants side by side, as a table. Knows nothing of where the numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from octavo.plugins.sim.metrics import Spread
from octavo.plugins.sim.summary import Summary

_ROWS: list[tuple[str, Callable[[Summary], str]]] = [
    ("requests served", lambda s: f"{s.finished} of {s.requests}"),
    ("not served", lambda s: ", ".join(f"{code} {n}" for code, n in sorted(s.unserved.items())) or "–"),
    ("virtual time", lambda s: f"{s.seconds:.1f} s"),
    ("steps", lambda s: str(s.steps)),
    ("executor busy", lambda s: f"{s.executor_busy:.0%}"),
    ("requests/s", lambda s: f"{s.requests_per_s:.2f}"),
    ("prompt tokens computed/s", lambda s: f"{s.prompt_per_s:.0f}"),
    ("output tokens/s", lambda s: f"{s.output_per_s:.0f}"),
    ("goodput, requests/s", lambda s: f"{s.goodput_per_s:.2f} ({s.kept:.0%})"),
    ("deadlines kept", lambda s: "–" if s.in_time is None else f"{s.in_time:.0%}"),
    ("fairness (Jain)", lambda s: f"{s.jain:.3f}"),
    ("largest service gap", lambda s: str(s.gap)),
    ("prefix hit rate", lambda s: f"{s.hit_rate:.1%}"),
    ("preemptions", lambda s: str(s.preemptions)),
    ("blocks evicted", lambda s: str(s.evicted)),
    ("policy answers rejected", lambda s: str(s.rejected)),
]

_SPREADS: list[tuple[str, Callable[[Summary], Spread | None]]] = [
    ("TTFT", lambda s: s.ttft),
    ("ITL", lambda s: s.itl),
    ("TPOT", lambda s: s.tpot),
    ("E2E", lambda s: s.e2e),
]

_PERCENTILES = ("p50", "p90", "p99")


def rows(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    """Each number by name, with a cell a variant."""
    for name, pick in _SPREADS:
        for percentile in _PERCENTILES:
            yield f"{name} {percentile}", [seconds(pick(summary), percentile) for summary in summaries]
    for name, show in _ROWS:
        yield name, [show(summary) for summary in summaries]


def table(title: str, summaries: Sequence[Summary]) -> Table:
    made = Table(title=title, title_justify="left")
    made.add_column("")
    for summary in summaries:
        made.add_column(summary.variant, justify="right")
    for number, (name, cells) in enumerate(rows(summaries), 1):
        spread_ends = number <= len(_SPREADS) * len(_PERCENTILES) and number % len(_PERCENTILES) == 0
        made.add_row(name, *cells, end_section=spread_ends)
    return made


def seconds(spread: Spread | None, percentile: str) -> str:
    if spread is None:
        return "–"
    value: float = getattr(spread, percentile)
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
