"""Variants side by side, as a table. Knows nothing of where the numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def table(title: str, summaries: Sequence[Summary]) -> Table:
    made = Table(title=title, title_justify="left")
    made.add_column("")
    for summary in summaries:
        made.add_column(summary.variant, justify="right")
    for name, pick in _SPREADS:
        for percentile in ("p50", "p90", "p99"):
            made.add_row(f"{name} {percentile}", *(_seconds(pick(summary), percentile) for summary in summaries))
        made.add_section()
    for name, show in _ROWS:
        made.add_row(name, *(show(summary) for summary in summaries))
    return made


def _seconds(spread: Spread | None, percentile: str) -> str:
    if spread is None:
        return "–"
    value: float = getattr(spread, percentile)
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
