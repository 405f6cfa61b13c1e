"""A run as spans: the same times and facts as its lives, in the form that a collector takes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.core.trace.catalogue import (
    Event,
    RequestFailed,
    RequestReceived,
)
from octavo.core.trace.life import lives
from octavo.core.trace.read import Line, records
from octavo.core.trace.run import Run
from octavo.plugins.otel import names
from octavo.plugins.otel.command import command
from octavo.plugins.otel.spans import ERROR, Span, spans
from tests.processes.daemon import daemon
from tests.trace.test_life import run_all

CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"


def line(ts_ns: int, event: Event) -> Line:
    return Line(ts_ns, 0, "tokenizer", 1, event)


def refused(trace_id: str) -> list[Span]:
    received = RequestReceived(request_id="r", trace_id=trace_id, attempt=0, tenant="acme", received_ns=5)
    failed = RequestFailed(request_id="r", code="never_fits", reason="too long")
    return list(spans(Run([line(10, received), line(20, failed)]), "m", 1000))


def facts(span: Span) -> dict[str, Any]:
    return {one.key: next(iter(one.value.values())) for one in span.attributes}


def test_a_request_that_failed_is_a_span_with_an_error() -> None:
    request, phase = refused("")
    assert (request.start_time_unix_nano, request.end_time_unix_nano) == ("1005", "1020")
    assert request.status is not None
    assert (request.status.code, request.status.message) == (ERROR, "never_fits")
    assert facts(request)[names.TENANT] == "acme"
    assert (phase.name, phase.parent_span_id, phase.trace_id) == ("tokenize", request.span_id, request.trace_id)


def test_the_callers_trace_is_gone_on_with() -> None:
    assert {span.trace_id for span in refused(CALLER)} == {CALLER}
    for trace_id in ("", "my own", "0" * 32):
        (made,) = {span.trace_id for span in refused(trace_id)}
        assert re.fullmatch("[0-9a-f]{32}", made)
    assert refused("a")[0].trace_id != refused("b")[0].trace_id


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """An address, and what was posted to it."""
    posted: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", posted
        finally:
            server.shutdown()
            thread.join()


def test_a_real_run_reaches_a_collector_as_its_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = time.time_ns()
    with daemon() as running, collector() as (address, posted):
        running.wait_ready()
        run_all(running, ("first", [1, 2, 3], 5), ("second", [4, 5, 6], 1))
        assert command(to=address, run=running.run_dir) == 0
        assert command(run=running.run_dir, out=tmp_path / "spans.json") == 0
        run = Run(records(running.run_dir))
    after = time.time_ns()
    ((path, body),) = posted
    assert path == "/v1/traces"
    assert body == msgspec.json.decode((tmp_path / "spans.json").read_bytes())
    sent = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
    roots = {span["spanId"]: span for span in sent if "parentSpanId" not in span}
    assert len(roots) == 2
    for name in ("first", "second"):
        (life,) = lives(run, name)
        (root,) = (
            s for s in roots.values() if {"key": names.RESPONSE_ID, "value": {"stringValue": name}} in s["attributes"]
        )
        took = int(root["endTimeUnixNano"]) - int(root["startTimeUnixNano"])
        assert took == life.e2e_ns
        assert before < int(root["startTimeUnixNano"]) < int(root["endTimeUnixNano"]) < after
        children = [span for span in sent if span.get("parentSpanId") == root["spanId"]]
        assert [span["name"] for span in children] == list(life.phases())
        assert sum(int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"]) for s in children) == took
    assert "of 2 requests" in capsys.readouterr().out


def test_a_collector_that_is_not_there_or_refuses_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    with daemon() as running:
        running.wait_ready()
        run_all(running, ("one", [1], 2))
        with collector(500) as (address, _):
            assert command(to=address, run=running.run_dir) == 1
        assert command(to=address, run=running.run_dir) == 1
        assert command(to="file:///etc/passwd", run=running.run_dir) == 1
    assert capsys.readouterr().err.count("took 0 spans and then failed") == 3


def test_every_name_is_of_the_conventions_or_our_own() -> None:
    told = [value for key, value in vars(names).items() if key.isupper() and key != "TEXT_COMPLETION"]
    assert all(value.startswith(("gen_ai.", "octavo.")) for value in told)
    assert len(told) == len(set(told))
