"""The simulator: real cores on a virtual clock, that repeat themselves and keep time as the cost model says."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.core.cli import main
from octavo.core.plugins import installed, resolve
from octavo.core.trace.read import lines
from octavo.plugins.sim import workload as workloads
from octavo.plugins.sim.cost import CostModel
from octavo.plugins.sim.fit import TERMS, fit
from octavo.plugins.sim.metrics import Slo
from octavo.plugins.sim.simulate import simulate
from octavo.plugins.sim.summary import Summary
from octavo.plugins.sim.variants import variants
from octavo.plugins.sim.workload import BUILT_IN, Segment, Session, Turn, Workload, limited

SMALL = ["kv.tokens=8192", "scheduler.max_sequences=16"]
FAST = CostModel(between=3e-4, step=2e-3, prefill_token=5e-5, decode=1e-4, attention=1e-8, kv_token=1e-8)


def run(
    workload: Workload, *sets: str, cost: CostModel = FAST, verify: bool = False, out: Path | None = None
) -> Summary:
    (variant,) = variants(None, {}, [*SMALL, *sets], [])
    return simulate(variant, workload, cost, Slo(ttft=0.5), verify=verify, out=out).summary


def single(prompt: int, output: int, start: float = 0.0) -> Session:
    return Session(start, (Turn((Segment(round(start * 1000) + 7, prompt),), output),))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_seed_is_a_result(name: str) -> None:
    def once(seed: int) -> bytes:
        return msgspec.json.encode(run(limited(BUILT_IN[name](40.0, seed), 6)))

    assert once(3) == once(3)
    assert once(3) != once(4)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_ghost_agrees_with_the_executor_of_lengths_event_by_event(name: str, tmp_path: Path) -> None:
    """The ghost checks every read on the way: what is simulated is sound."""
    for folder, verify in (("lean", False), ("ghost", True)):
        run(limited(BUILT_IN[name](30.0, 0), 6), "kv.tokens=6000", verify=verify, out=tmp_path / folder)
    for file in sorted((tmp_path / "lean").glob("trace-*")):
        assert file.read_bytes() == (tmp_path / "ghost" / file.name).read_bytes()


def test_one_request_alone_takes_what_its_way_and_its_steps_cost() -> None:
    cost = CostModel(
        step=1.0, prefill_token=0.1, decode=0.01, attention=0.0, kv_token=0.0,
        to_kv=0.002, to_executor=0.003, to_scheduler=0.004, to_client=0.005,
    )  # fmt: skip
    found = run(iter([single(prompt=10, output=3)]), cost=cost)
    assert found.ttft is not None
    assert found.tpot is not None
    matched = 2 * cost.to_kv
    first = cost.to_client + matched + cost.to_kv + cost.to_executor + 2.0 + cost.to_scheduler + cost.to_client
    assert found.ttft.mean == pytest.approx(first, abs=1e-6)
    assert found.tpot.mean == pytest.approx(1.01, abs=1e-6)  # the next step is bound already: no hop between
    assert found.steps == 3 + 1  # the last one only releases


def test_what_is_swapped_to_host_memory_and_back_takes_its_time() -> None:
    """The second prompt pushes the first one's blocks out, and the third request brings them back."""
    memory = ("kv.tokens=128", "kv.host_tokens=512", "kv.block_size=16")
    asked = [Session(at, (Turn((Segment(seed, 100),), 2),)) for at, seed in ((0.0, 1), (100.0, 2), (200.0, 1))]
    cheap, dear = (
        run(iter(asked), *memory, cost=msgspec.structs.replace(FAST, copied_block=each)) for each in (0.0, 1.0)
    )
    assert cheap.ttft is not None
    assert dear.ttft is not None
    assert dear.ttft.mean > cheap.ttft.mean + 2, "a second for each of six blocks and more, over three requests"


def test_planning_ahead_hides_the_way_between_processes() -> None:
    cost = CostModel(step=1e-3, to_kv=1e-3, to_executor=1e-3, to_scheduler=1e-3)
    at_once, ahead = (run(iter([single(8, 50)]), f"scheduler.depth={depth}", cost=cost) for depth in (1, 4))
    assert at_once.tpot is not None
    assert ahead.tpot is not None
    assert at_once.tpot.mean > ahead.tpot.mean + 2e-3


@pytest.mark.parametrize("verify", [False, True])
def test_rounds_take_the_way_between_processes_once(verify: bool) -> None:
    cost = CostModel(step=1e-3, to_kv=1e-3, to_executor=1e-3, to_scheduler=1e-3)
    asked = [single(8, 82)]  # a chunk, a decode, and ten times eight of them
    single_steps, rounds = (
        run(iter(asked), "scheduler.depth=1", f"scheduler.tell_every_ms={ms}", cost=cost, verify=verify)
        for ms in (0, 80)
    )
    assert single_steps.tpot is not None
    assert rounds.tpot is not None
    assert rounds.tpot.mean < 0.8 * single_steps.tpot.mean
    assert single_steps.steps == 83  # the last one only releases
    assert rounds.steps == 13


def test_a_request_with_one_token_has_no_tpot() -> None:
    found = run(iter([single(8, 1)]))
    assert found.ttft is not None
    assert found.tpot is None
    assert found.itl is None


def test_what_can_never_be_served_is_counted_and_stops_nobody() -> None:
    found = run(iter([single(20_000, 5), single(20, 5, start=0.1)]))
    assert found.finished == 1
    assert found.unserved == {"context_length_exceeded": 1}
    assert found.kept == 0.5


def test_choices_share_their_prompt_and_stops_and_cancels_end_them(tmp_path: Path) -> None:
    def asked(start: float, output: int, **more: Any) -> Session:
        return Session(start, (Turn((Segment(round(start * 1e4), 40),), output, **more),))

    talk = Turn((Segment(1, 40),), 6, others=(3, 9))
    found = run(
        iter(
            [
                Session(0.0, (talk, Turn((Segment(2, 4),), 5, think_s=0.1))),  # goes on when all three have ended
                asked(0.001, 6, limit=50),
                asked(0.002, 7, limit=None),
                asked(0.003, 60, cancel_s=0.05),
                asked(0.004, 60, others=(60,), cancel_s=0.0),  # given up before it began
                asked(0.005, 6, cancel_s=60.0),
            ]
        ),
        out=tmp_path,
    )
    assert (found.requests, found.finished, found.unserved) == (10, 7, {"cancelled": 3})
    delivered = [event for event in lines(tmp_path) if event["event"] == "request.delivered"]
    tokens = sorted((event["request_id"], event["choice"], event["output_tokens"]) for event in delivered)
    first = [("s0.0", 0, 6), ("s0.0", 1, 3), ("s0.0", 2, 9), ("s0.1", 0, 5)]
    assert tokens == [*first, ("s1.0", 0, 6), ("s2.0", 0, 7), ("s5.0", 0, 6)]
    forked = [event for event in lines(tmp_path) if event["event"] == "request.admitted" and event["how"] == "fork"]
    assert len(forked) == 2
    finished = {(e["request_id"], e["choice"]): e for e in lines(tmp_path) if e["event"] == "request.finished"}
    assert finished["s1.0", 0]["detail"] == "stop string"
    assert finished["s3.0", 0]["finish"] == "cancelled"
    assert 0 < finished["s3.0", 0]["output_tokens"] < 60


def test_turns_follow_answers_and_find_what_was_said() -> None:
    talk = Session(0.0, (Turn((Segment(1, 200),), 40), Turn((Segment(2, 10),), 5, think_s=1.0)))
    found = run(iter([talk]))
    assert found.finished == 2
    assert found.hit_rate == pytest.approx((200 + 40) // 16 * 16 / (200 + 250), abs=0.04)
    assert found.seconds > 1.0


def test_a_simulated_trace_reads_like_a_real_one_and_gives_the_cost_model_back(tmp_path: Path) -> None:
    run(limited(workloads.mix(30.0, 0), 40), out=tmp_path)
    fitted = fit(lines(tmp_path), "sim")
    for term in (*TERMS, "to_kv", "to_executor", "between", "to_scheduler", "to_client"):
        made = getattr(FAST, term)
        assert getattr(fitted.cost, term) == (made if made is None else pytest.approx(made, rel=0.02, abs=1e-9)), term
    assert fitted.mean_error < 1e-3
    assert main(["trace", "show", "s0.0", "--run", str(tmp_path)]) == 0


def test_scarce_blocks_preempt_and_everybody_is_served() -> None:
    found = run((single(60, 120, i / 1000) for i in range(12)), "kv.tokens=1024")
    assert found.preemptions > 0
    assert found.finished == 12


def test_shortest_first_helps_most_when_long_and_short_wait() -> None:
    crowd = [single(600, 100, i / 1000) for i in range(30)] + [single(20, 5, 0.03 + i / 1000) for i in range(30)]
    fcfs, shortest = (run(iter(crowd), f"policies.batching={name}") for name in ("fcfs", "shortest"))
    assert fcfs.e2e is not None
    assert shortest.e2e is not None
    assert shortest.e2e.mean < 0.8 * fcfs.e2e.mean


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_workload_comes_at_its_rate_in_order(name: str) -> None:
    sessions = list(islice(BUILT_IN[name](5.0, 1), 1000))
    starts = np.array([session.start_s for session in sessions])
    assert (np.diff(starts) >= 0).all()
    rate = sum(len(session.turns) for session in sessions) / starts[-1]
    assert rate == pytest.approx(5.0, rel=0.5 if name == "bursts" else 0.15)


def test_segments_are_their_seed_and_prefixes_of_each_other() -> None:
    a, b = Segment(5, 100).ids(), Segment(5, 40).ids()
    assert (a[:40] == b).all()
    assert (a >= 0).all()
    assert len(np.unique(a)) > 95
    assert not (Segment(6, 100).ids() == a).any()


# ── the command ──────────────────────────────────────────────────────────────────────────────────


class Frames(HTMLParser):
    """What a page has in its frames, and what it would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pages: list[str] = []
        self.loaded: list[str] = []
        self.lines = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loaded += [f"{tag} {values[name]}" for name in ("src", "href") if name in values]
        self.lines += tag == "polyline"
        if tag == "iframe":
            self.pages.append(values["srcdoc"] or "")


def test_variants_stand_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = "sim --workload shared --rate 5 --requests 8 --set kv.tokens=8192"
    against = "--against shortest --against kv.prefix_cache=false --json --slo ttft=0.5"
    picture = tmp_path / "out.html"
    assert main([*words.split(), *against.split(), "--html", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["variant"] for one in report["variants"]] == ["fcfs", "shortest", "prefix_cache=false"]
    cached, _, uncached = report["variants"]
    assert uncached["hit_rate"] == 0 < cached["hit_rate"]
    shown = Frames(picture.read_text(encoding="utf-8"))
    assert len(shown.pages) == 3
    assert all(f'"s{number}.0"' in page for page in shown.pages for number in range(8))
    assert shown.loaded == []
    assert shown.lines == 3 * 3
    assert main(words.split()) == 0
    assert "TTFT p99" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--workload chatt", "there is no workload 'chatt'; there are chat, shared"),
        ("--slo ttft", "not a number of seconds"),
        ("--rate 0", "--rate 0"),
        ("--trace nothing.jsonl", "No such file"),
        ("--cost nothing.json", "No such file"),
        ("--against nobody", "no octavo.batching plugin is called 'nobody'"),
    ],
)
def test_a_mistake_is_named_and_ends_with_2(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *words.split()]) == 2
    assert why in capsys.readouterr().err


# ── traces ───────────────────────────────────────────────────────────────────────────────────────


def test_own_and_mooncake_lines_are_requests(tmp_path: Path) -> None:
    from octavo.plugins.sim.traces import load

    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 2000, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}\n'
        "\n"
        '{"arrival_s": 1.0, "input_length": 300, "output_length": 7, "hash_ids": [4], "block": 128, "tenant": "a",'
        ' "priority": 2, "deadline_s": 3.0}\n'
        '{"arrival_s": 4.0, "ids": [1, 2, 3], "output_length": 2, "request_id": "mine"}\n'
        '{"arrival_s": 5.0, "ids": [1], "output_length": 2, "n": 3, "max_tokens": 9, "cancel_s": 1.5}\n'
    )
    own, mooncake, ids, several = load(file)
    assert (own.start_s, mooncake.start_s, ids.start_s) == (0.0, 1.0, 3.0)
    assert (own.tenant, own.priority, own.deadline_s) == ("a", 2, 3.0)
    assert [len(one.turns[0].new_ids()) for one in (own, mooncake, ids)] == [300, 700, 3]
    assert (own.turns[0].new_ids()[:128] == mooncake.turns[0].new_ids()[:128]).all()
    assert ids.turns[0].name == "mine"
    (turn,) = several.turns
    assert (turn.outputs, turn.max_tokens, turn.cancel_s) == ((2, 2, 2), 9, 1.5)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2"),
        ('{"arrival_s": 1.0, "output_length": 7}', "line 2: needs ids, or input_length"),
        ('{"arrival_s": 1.0, "output_length": 0, "ids": [1]}', r"line 2.*>= 1.*output_length"),
        ('{"arrival_s": 1.0, "output_length": 1, "ids": [1], "tennant": "a"}', "tennant"),
        ('{"arrival_s": 1.0, "output_length": 5, "ids": [1], "max_tokens": 4}', "5 is more than max_tokens 4"),
    ],
)
def test_a_wrong_line_is_named(line: str, why: str, tmp_path: Path) -> None:
    from octavo.plugins.sim.traces import TraceError, load

    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "input_length": 3, "output_length": 7}\n' + line)
    with pytest.raises(TraceError, match=why):
        load(file)


class Broken:
    """A batching policy that cannot answer."""

    def select(self, *_: object) -> None:
        raise RuntimeError("no idea")


def test_a_policy_that_was_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(group: str, name: str) -> Any:
        return Broken if name == "fcfs" else resolve(group, name)

    monkeypatch.setattr("octavo.core.policy.load.resolve", broken)
    found = run(iter([single(8, 9)]))
    assert found.finished == 1
    assert found.rejected == 3
    (why,) = found.tripped
    assert "batching fcfs" in why
    assert "no idea" in why


def test_the_page_has_every_installed_policy_of_a_kind_and_marks_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    words = "sim --table --workload mix --requests 6 --rate 50 --set scheduler.max_sequences=2"
    assert main(words.split()) == 0
    page = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in page if line.startswith(("| batching ", "| chunking "))]
    for group in ("batching", "chunking"):
        named = [
            name for row in rows if row[0].startswith(f"| {group} ") for name in row[0][len(group) + 3 :].split(", ")
        ]
        assert sorted(name.removesuffix(" *") for name in named) == installed(f"octavo.{group}")
    assert len(rows) < 13  # without tenants `fair` has nothing to do but what `fcfs` does
    ttft = [row[1] for row in rows]
    assert 0 < sum(cell.startswith("**") for cell in ttft) < len(ttft)
    assert main(["sim", "--table", "--against", "fair"]) == 2
