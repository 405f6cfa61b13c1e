"""A run as a picture: the Perfetto file keeps its format's rules and says what the run says; the page needs nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.core.cli import main
from octavo.core.trace.life import lives
from octavo.core.trace.read import Line
from octavo.core.trace.run import Run
from octavo.plugins.timeline import chrome, page
from octavo.plugins.timeline.command import export
from tests.metrics.browser import chromium
from tests.trace.conftest import Loaded

NEEDED = {
    # Keys that each kind of event must have, by the format.
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "ts", "s"},
    "b": {"name", "cat", "pid", "ts", "id", "args"},
    "e": {"name", "cat", "pid", "ts", "id"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "t": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}
ROUNDING_US = 0.002


@pytest.fixture(scope="module")
def exported(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("perfetto") / "trace.json"
    assert export(run=loaded.path, out=target) == 0
    return target


@pytest.fixture(scope="module")
def events(exported: Path) -> list[dict[str, Any]]:
    return list(msgspec.json.decode(exported.read_bytes())["traceEvents"])


def test_the_file_is_a_document_of_our_schema(exported: Path) -> None:
    document = msgspec.json.decode(exported.read_bytes(), type=chrome.Document, strict=True)
    assert msgspec.json.encode(document) == exported.read_bytes()


def test_every_event_has_what_the_format_asks_for(events: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in events} == NEEDED.keys()
    for event in events:
        missing = NEEDED[event["ph"]] - event.keys()
        assert not missing, (event, missing)
        assert event.get("ts", 0) >= 0 or event["ph"] in "be"
        assert event.get("dur", 0) >= 0


def test_an_actor_does_one_thing_after_the_other(events: list[dict[str, Any]]) -> None:
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert len(lanes) == 4
    for works in lanes.values():
        for before, after in pairwise(sorted(works)):
            assert before[1] <= after[0] + ROUNDING_US, (before, after)


def test_each_step_is_an_arrow_through_the_processes(loaded: Loaded, events: list[dict[str, Any]]) -> None:
    slices = [e for e in events if e["ph"] == "X"]
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            arrows[event["id"]].append(event)
    assert len(arrows) == len(loaded.run.steps)
    pid = chrome.PROCESSES
    whole = [pid["scheduler"], pid["kv"], pid["executor"], pid["scheduler"]]
    places = [[event["pid"] for event in sorted(arrow, key=lambda e: e["ts"])] for arrow in arrows.values()]
    assert sum(place == whole for place in places) >= len(places) - 4  # the last ones may be cut off
    by_pid = defaultdict(list)
    for one in slices:
        by_pid[one["pid"]].append((one["ts"], one["ts"] + one["dur"]))
    for event in next(iter(arrows.values())):
        assert any(start <= event["ts"] <= end for start, end in by_pid[event["pid"]])
    for record in loaded.run.steps:
        assert len({who.request_id for who in record.members}) <= record.plan.sequences == len(record.members)


def test_phases_lie_inside_their_request_and_sum_to_it(loaded: Loaded, events: list[dict[str, Any]]) -> None:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] in ("b", "e"):
            rows[event["id"]].append(event)
    assert len(rows) == sum(len(seen.finishes) for seen in loaded.seen.values())
    for row in rows.values():
        depth, opened, total = 0, 0.0, 0.0
        for event in row:
            depth += 1 if event["ph"] == "b" else -1
            assert 0 <= depth <= 2
            if depth == 2:
                opened = event["ts"]
            elif event["ph"] == "e" and depth == 1:
                total += event["ts"] - opened
        assert depth == 0
        assert abs(total - (row[-1]["ts"] - row[0]["ts"])) < 1


def test_an_empty_run_is_an_empty_picture() -> None:
    nothing: list[Line] = []
    assert all(isinstance(e, chrome.Metadata) for e in chrome.document(Run(nothing), {}).trace_events)
    assert "/*DATA*/" not in page.render(Run(nothing), {})


# ── the page ─────────────────────────────────────────────────────────────────────────────────────


class Frames(HTMLParser):
    """The pages inside a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pages: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "iframe":
            self.pages.append(dict(attrs)["srcdoc"] or "")


def data_of(text: str) -> page.Data:
    found = re.search(r"^const DATA = (.*);$", text, re.MULTILINE)
    assert found
    return msgspec.json.decode(found[1], type=page.Data)


@pytest.fixture(scope="module")
def both(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run beside what the simulator makes of the same requests."""
    folder = tmp_path_factory.mktemp("both")
    assert main(["sim", "--trace", str(loaded.path), "--out", str(folder / "simulated"), "--json"]) == 0
    assert export(run=loaded.path, beside_=[folder / "simulated"], out=folder / "both.html") == 0
    return folder / "both.html"


def test_a_simulated_run_lies_beside_the_real_one(loaded: Loaded, both: Path) -> None:
    real, simulated = map(data_of, Frames(both.read_text(encoding="utf-8")).pages)
    assert simulated.about["model"] == "simulated"
    assert {choice.id for choice in real.choices} == set(loaded.seen)
    answered = {choice.id for choice in real.choices if choice.output}
    assert 0 < len(answered) <= len({choice.id for choice in simulated.choices})
    for one in (real, simulated):
        assert one.lanes["executor"]
        assert one.counters
    assert not re.search(r"""(src|href)\s*=|url\(|@import|\bfetch\(|import\(|https?://""", both.read_text())


def test_a_browser_draws_both_and_they_show_the_same_time(both: Path, tmp_path: Path) -> None:
    asking = """<script>addEventListener("load", () => {
      const [one, other] = [...document.querySelectorAll("iframe")].map(frame => frame.contentWindow);
      one.eval("shift(5000)");
      setTimeout(() => {
        const seen = [one, other].map(page => page.eval("`${Math.round(from - first)} to ${Math.round(to - first)}`"));
        document.body.append(`shown: ${seen.join(" | ")} :end`);
      }, 900);
    });</script>"""
    asked = tmp_path / "asked.html"
    asked.write_text(both.read_text(encoding="utf-8").replace("</body>", asking + "</body>"), encoding="utf-8")
    dom = chromium(tmp_path / "profile", asked.as_uri(), "--virtual-time-budget=5000", "--dump-dom")
    shown = re.search(r"shown: (.*) to (.*) \| (.*) to (.*) :end", dom)
    assert shown
    assert shown[1] == shown[3]
    assert shown[2] == shown[4]


@pytest.fixture(scope="module")
def html(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("page") / "run.html"
    assert export(run=loaded.path, out=target, html=True) == 0
    return target


def test_the_page_loads_nothing_from_anywhere(html: Path) -> None:
    text = html.read_text()
    assert not re.search(r"""(src|href)\s*=|url\(|@import|\bfetch\(|import\(|XMLHttpRequest|https?://""", text)
    assert text.count("<script") == text.count("</script") == 1


def test_the_page_holds_what_the_trace_holds(loaded: Loaded, html: Path) -> None:
    data = data_of(html.read_text())
    told = {(choice.id, choice.choice): choice for choice in data.choices}
    for name in loaded.seen:
        for life in lives(loaded.run, name):
            choice = told[life.who.request_id, life.who.choice]
            assert [phase.name for phase in choice.phases][:4] == ["tokenize", "handoff", "queue", "prefill"]
            assert life.e2e_ns is not None
            assert abs(choice.end - choice.start - life.e2e_ns // 1000) <= 1
    assert len(data.lanes["executor"]) == sum(record.executed is not None for record in loaded.run.steps)


def test_a_text_from_outside_cannot_end_the_script() -> None:
    rendered = page.render(Run([]), {"model": "</script><b>"})
    assert rendered.count("</script") == 1


def test_a_browser_draws_the_page_and_finds_a_request(html: Path, tmp_path: Path) -> None:
    dom = chromium(tmp_path, f"{html.as_uri()}#request=chatcmpl-r37", "--virtual-time-budget=3000", "--dump-dom")
    assert 'data-drawn="yes"' in dom
    panel = dom.split('<aside id="panel">')[1].split("</aside>")[0]
    assert ">r37</h2>" in panel
    assert ">prefill</span>" in panel
