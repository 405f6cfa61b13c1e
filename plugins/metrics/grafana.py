"""Makes grafana.json, a dashboard to import into Grafana: `python -m octavo.plugins.metrics.grafana`.

Every panel is a query over metrics of ours; a test asks a real `/metrics` for each name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

TARGET = Path(__file__).with_name("grafana.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}
RATE = "[$__rate_interval]"


class Panel(NamedTuple):
    """`queries` by their legend."""

    title: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False


def _percentiles(metric: str) -> dict[str, str]:
    return {
        f"p{round(100 * share)}": f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{RATE})))"
        for share in (0.5, 0.9, 0.99)
    }


PANELS = (
    Panel("Tokens", "short", {
        "output": f"sum(rate(octavo_output_tokens_total{RATE}))",
        "prompt": f"sum(rate(octavo_prompt_tokens_total{RATE}))",
    }),
    Panel("Requests by outcome", "reqps", {
        "{{outcome}}": f"sum by (outcome) (rate(octavo_request_outcomes_total{RATE}))",
    }, stacked=True),
    Panel("Time to first token", "s", _percentiles("octavo_time_to_first_token_seconds")),
    Panel("Between tokens", "s", _percentiles("octavo_inter_token_seconds")),
    Panel("Time per output token", "s", _percentiles("octavo_time_per_output_token_seconds")),
    Panel("Whole requests", "s", _percentiles("octavo_request_seconds")),
    Panel("Queued for", "s", _percentiles("octavo_queue_seconds")),
    Panel("Sequences", "short", {"{{state}}": "sum by (state) (octavo_sequences)"}),
    Panel("KV blocks", "short", {"{{state}}": "sum by (state) (octavo_kv_blocks)"}, stacked=True),
    Panel("Prompt tokens found in the cache", "percentunit", {
        "share": f"sum(rate(octavo_cached_tokens_total{RATE})) / sum(rate(octavo_prompt_tokens_total{RATE}))",
    }),
    Panel("Preempted and evicted", "short", {
        "preemptions": f"sum(rate(octavo_preemptions_total{RATE}))",
        "evicted blocks": f"sum(rate(octavo_kv_evicted_blocks_total{RATE}))",
    }),
    Panel("Guesses", "short", {"{{outcome}}": f"sum by (outcome) (rate(octavo_draft_tokens_total{RATE}))"}),
    Panel("Steps, and tokens in each", "short", {
        "steps": f"sum(rate(octavo_steps_total{RATE}))",
        "tokens a step": f"sum(rate(octavo_step_tokens_sum{RATE})) / sum(rate(octavo_step_tokens_count{RATE}))",
    }),
    Panel("Output by tenant", "short", {
        "{{tenant}}": f"sum by (tenant) (rate(octavo_tenant_output_tokens_total{RATE}))",
    }, stacked=True),
    Panel("Processes that are ready", "short", {"{{actor}}": "sum by (actor) (octavo_actor_ready)"}),
    Panel("Restarts, and policies switched off", "short", {
        "{{actor}}": "sum by (actor) (octavo_actor_restarts_total)",
        "policies off": "sum(octavo_policies_off)",
    }),
)  # fmt: skip

COLUMNS, WIDTH, HEIGHT = 2, 12, 8


def document() -> dict[str, Any]:
    """The dashboard, as Grafana imports it (schema of version 10 and later)."""
    return {
        "title": "Octavo",
        "uid": "octavo",
        "schemaVersion": 39,
        "tags": ["llm"],
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    place = {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
    custom = {"stacking": {"mode": "normal" if panel.stacked else "none"}, "fillOpacity": 20 if panel.stacked else 0}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    return msgspec.json.format(msgspec.json.encode(document()), indent=1).decode() + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
