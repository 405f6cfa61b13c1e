"""Several runs in the timeline's page, side by side: whatever part of the time one of them shows, all show.

Times are since each run's first request, so that a simulated run lies beside the real one that it was made after.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from octavo.core.trace.run import Run
from octavo.plugins.timeline import page

STYLE = """
.runs { display: flex; flex-wrap: wrap; gap: 1em; }
.run { flex: 1 1 45%; min-width: 40em; }
iframe { width: 100%; height: 80vh; border: 1px solid #ccc; }
"""

RELAY = """
addEventListener("message", event => {
  for (const frame of document.querySelectorAll("iframe")) {
    if (frame.contentWindow !== event.source) frame.contentWindow.postMessage(event.data, "*");
  }
});
"""


def frames(shown: Iterable[tuple[str, Run, dict[str, str]]]) -> str:
    """Of each run its heading (HTML), and what `page.render` takes. Belongs into a page with `STYLE`, once."""
    runs = "".join(
        f'<div class="run"><h2>{heading}</h2><iframe srcdoc="{escape(page.render(run, about))}"></iframe></div>'
        for heading, run, about in shown
    )
    return f'<div class="runs">{runs}</div><script>{RELAY}</script>'


def render(runs: Iterable[tuple[Run, dict[str, str]]]) -> str:
    """One page of them all; it loads nothing from anywhere."""
    shown = [(escape(" · ".join(filter(None, about.values()))), run, about) for run, about in runs]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Octavo timelines</title>'
        f"<style>body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1em; }} {STYLE}</style></head>"
        f"<body>{frames(shown)}</body></html>"
    )
