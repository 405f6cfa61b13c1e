"""A simulation as one HTML page that loads nothing: the numbers of all variants, their distributions, and each run in
the timeline's page, side by side.

Pure: knows nothing of how the runs came about. A curve is a cumulative distribution: at height y is the time that the
share y of the requests did not exceed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from octavo.core.trace.run import Run
from octavo.plugins.sim.metrics import Floats
from octavo.plugins.sim.report import rows
from octavo.plugins.sim.simulate import Simulated
from octavo.plugins.timeline import beside

WIDTH, HEIGHT, LEFT, BELOW = 520, 240, 34, 22
COLOURS = ("#2c6fbb", "#c8553d", "#3f8f4f", "#8a5bb0", "#b8860b", "#4aa3a2")
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .15em .8em; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.row { display: flex; flex-wrap: wrap; gap: 1em; }
svg text { font-size: 11px; fill: #555; }
"""


class Shown(NamedTuple):
    found: Simulated
    run: Run


def render(title: str, variants: Sequence[Shown]) -> str:
    """The page."""
    found = [shown.found for shown in variants]
    curves = "".join(
        f"<figure><figcaption>{name}</figcaption>{_curves([getattr(one.times, column) for one in found])}</figure>"
        for name, column in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"))
    )
    runs = beside.frames(
        (_name(i, shown.found), shown.run, {"model": "simulated", "run": shown.found.summary.variant})
        for i, shown in enumerate(variants)
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}{beside.STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<div class="row">{_table(found)}<div>{curves}</div></div>{runs}</body></html>'
    )


def _name(i: int, one: Simulated) -> str:
    return f'<span style="color:{COLOURS[i % len(COLOURS)]}">■</span> {escape(one.summary.variant)}'


def _table(found: Sequence[Simulated]) -> str:
    head = "".join(f"<th>{_name(i, one)}</th>" for i, one in enumerate(found))
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, cells in rows([one.summary for one in found])
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _curves(columns: Sequence[Floats]) -> str:
    """Cumulative distributions over one axis of time, from 0 to the longest."""
    values = [np.sort(column[~np.isnan(column)]) for column in columns]
    most = max((float(column[-1]) for column in values if len(column)), default=0.0) or 1.0
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join((*_axes(most), *_lines(values, most)))}</svg>'


def _axes(most: float) -> Iterator[str]:
    for share in (0.0, 0.5, 0.9, 1.0):
        y = _y(share)
        yield f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="0" y="{y + 4:.1f}">{share:.0%}</text>'
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if part == 1.0 else "middle"
        yield f'<text x="{_x(part):.1f}" y="{HEIGHT - 4}" text-anchor="{anchor}">{part * most:.3g} s</text>'


def _lines(values: Sequence[Floats], most: float) -> Iterator[str]:
    for i, column in enumerate(values):
        if len(column):
            kept = np.unique(np.linspace(0, len(column) - 1, 400).astype(np.int64))
            shares, times = (kept + 1) / len(column), column[kept] / most
            points = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in zip(times.tolist(), shares.tolist(), strict=True))
            colour = COLOURS[i % len(COLOURS)]
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>'


def _x(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - 4)


def _y(share: float) -> float:
    return 8 + (1 - share) * (HEIGHT - BELOW - 8)
