"""`octavo top` and `/dashboard`: the same figures, of what the service did."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from octavo.core.control import Status
from octavo.core.trace.catalogue import RequestTaken, StepExecuted
from octavo.plugins.metrics import dashboard
from octavo.plugins.metrics.live import Figures, Live, percentiles
from octavo.plugins.metrics.tail import MOST_BYTES, Tail
from tests.metrics.browser import chromium
from tests.processes.daemon import Daemon, daemon, eventually

MS = 1_000_000


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    with daemon("kv.tokens=1024", gateway=True) as running:
        running.wait_ready()
        for i in range(6):
            body = {
                "prompt": "a common beginning, long enough for blocks" + "!" * i,
                "max_tokens": 9,
                "ignore_eos": True,
            }
            assert httpx.post(f"{running.info().address}/v1/completions", json=body, timeout=60).status_code == 200
        eventually("all were taken", lambda: len(running.events("request.taken")) == 6)
        yield running


def look(running: Daemon, live: Live) -> Figures:
    status = running.status()
    assert status is not None
    return live.look(status)


def test_the_figures_are_those_of_the_service(served: Daemon) -> None:
    def heard() -> Figures | None:
        figures = look(served, live)
        return figures if figures.policies and figures.pool.tenants and figures.pool.cached else None

    live = Live(served.info())
    figures = eventually("heartbeats with numbers", heard)
    assert figures.state == "ready"
    assert {process.role for process in figures.processes} == set(served.pids())
    assert all(process.resident for process in figures.processes)
    for name in ("ttft", "itl", "tpot", "e2e"):
        found = figures.latencies[name]
        assert found.count == 6
        assert 0 < found.p50 <= found.p90 <= found.p99
    assert figures.hit_rate is not None
    assert 0.3 < figures.hit_rate < 1
    pool = figures.pool
    assert pool.used + pool.cached + pool.free == pool.total == 256
    assert pool.tenants == [("(no tenant)", pool.cached + pool.used)]
    by_group = {policy.group: policy for policy in figures.policies}
    assert by_group["batching"].name == "fcfs"
    assert by_group["batching"].calls > 0
    assert by_group["batching"].mean_us > 0
    assert not any(policy.tripped for policy in figures.policies)
    again = look(served, live)
    assert again.tokens_per_s is not None
    assert again.history[-1] == (again.tokens_per_s, again.running, again.waiting)
    assert len(again.history) == len(figures.history) + 1
    assert again.latencies == figures.latencies  # nothing new, nothing twice


def test_the_page_shows_them_to_a_browser(served: Daemon, tmp_path: Path) -> None:
    address = f"{served.info().address}/dashboard"
    dom = chromium(tmp_path, address, "--virtual-time-budget=5000", "--dump-dom")
    assert 'data-drawn="yes"' in dom
    for part in ("fcfs", "decode-first", "TTFT", "scheduler", "(no tenant)"):
        assert f">{part}</td>" in dom
    assert re.search(r'<b id="hits">\d+ %</b>', dom)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = dashboard.PAGE.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=|url\(|@import|import\(|XMLHttpRequest|https?://""", text)
    assert re.findall(r"fetch\((.*?)[,)]", text) == ['"dashboard/data"']


def test_the_data_are_the_figures_of_one_look(served: Daemon) -> None:
    answer = httpx.get(f"{served.info().address}/dashboard/data", timeout=30)
    figures = msgspec.json.decode(answer.content, type=Figures)
    assert figures.latencies["e2e"].count == 6


# ── without a daemon ─────────────────────────────────────────────────────────────────────────────


def test_percentiles_are_of_what_is_known() -> None:
    found = percentiles([*(i * MS for i in range(1, 101)), None])
    assert (found.count, found.p50, found.p90, found.p99) == (100, 51, 91, 100)
    assert percentiles([None]).count == 0


def taken(name: str) -> bytes:
    event = RequestTaken(
        request_id=name, choice=0, tokens=1, rows=1, ttft_ns=1, itl_ns=None, longest_ns=None, tpot_ns=None, e2e_ns=1,
        held_ns=0, last_held_ns=0, ttft_off_ns=None, itl_off_ns=None, tpot_off_ns=None, e2e_off_ns=None,
    )  # fmt: skip
    common = b'{"ts_ns":1,"spent_ns":0,"generation":1,"role":"tokenizer","replica":0,'
    return common + msgspec.json.encode(event)[1:] + b"\n"


def names(tail: Tail) -> list[str]:
    return [line.event.request_id for line in tail.new() if isinstance(line.event, RequestTaken)]


def test_a_tail_gives_each_line_once_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace-tokenizer-0.jsonl"
    tail = Tail(tmp_path, ("tokenizer", "kv"), (RequestTaken,))
    assert names(tail) == []
    path.write_bytes(taken("a") + taken("b")[:-9])
    assert names(tail) == ["a"]
    with path.open("ab") as file:
        file.write(taken("b")[-9:] + b'{"event":"request.taken"\n' + taken("c"))
    assert names(tail) == ["b", "c"]
    assert names(tail) == []


def test_a_tail_that_was_away_for_long_reads_the_newest(tmp_path: Path) -> None:
    filler = b'{"event":"step.executed"}\n' * (MOST_BYTES // 20)
    (tmp_path / "trace-kv-0.jsonl").write_bytes(taken("old") + filler + taken("new"))
    assert names(Tail(tmp_path, ("kv",), (RequestTaken, StepExecuted))) == ["new"]


def test_a_silent_service_has_figures_too(tmp_path: Path, served: Daemon) -> None:
    info = msgspec.structs.replace(served.info(), run_dir=str(tmp_path))
    figures = Live(info).look(Status(state="starting", epoch=1, actors=[]))
    assert (figures.running, figures.hit_rate, figures.policies, figures.tokens_per_s) == (0, None, [], None)
