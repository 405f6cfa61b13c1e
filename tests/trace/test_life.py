"""Why a request took as long as it did: the chain has no gaps, and names what the test did."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.trace.catalogue import Event, RequestFailed, RequestPreempted, RequestReceived, RequestTaken
from octavo.core.trace.life import Life, lives
from octavo.core.trace.read import Line, lines, records
from octavo.core.trace.run import Run
from octavo.core.trace.show import tell
from octavo.core.trace.slow import Threshold, find_slow
from tests.processes.daemon import Daemon, daemon, eventually
from tests.trace.conftest import REQUESTS, Loaded
from tests.trace.load import Seen, ended, one, until_tokens

MS = 1_000_000
BLOCKS = 64
"""Of four tokens: the pool of the daemon here."""


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    """Two slots, and a pool that two long answers do not fit."""
    with daemon("kv.tokens=256", "scheduler.max_sequences=2", "scheduler.chunk_budget=16") as running:
        running.wait_ready()
        yield running


def run_all(running: Daemon, *asked: tuple[str, list[int], int], kill: bool = False) -> dict[str, list[Life]]:
    """Ask all at once, in this order; what the trace tells of each. `kill` the executor once the last has tokens.

    Of several, the executor stands still until all are queued: however slow this side is, none ends before the last
    has come.
    """
    before = ended(running.run_dir)
    seen: dict[str, Seen] = {}
    executor = running.pids()["executor"]

    async def ask() -> None:
        async with Client.connect(running.run_dir) as client, anyio.create_task_group() as tasks:
            await client.wait_ready(60)
            if len(asked) > 1:
                os.kill(executor, signal.SIGSTOP)
            for name, ids, most in asked:
                tasks.start_soon(one, client, name, ids, most, 1, seen)
                if len(asked) > 1:
                    await anyio.to_thread.run_sync(eventually, f"{name} is queued", partial(queued, running, name))
            if len(asked) > 1:
                os.kill(executor, signal.SIGCONT)
            if kill:
                await until_tokens(seen, name, 5)
                os.kill(executor, signal.SIGKILL)

    anyio.run(ask)
    eventually("all ends are in the trace", lambda: ended(running.run_dir) == before + len(asked))
    eventually("so is every step", running.is_written)
    run = Run(records(running.run_dir))
    return {name: lives(run, name) for name, _, _ in asked}


def queued(running: Daemon, name: str) -> bool:
    return any(line["event"] == "request.queued" and line["request_id"] == name for line in lines(running.run_dir))


def distinct(start: int, count: int) -> list[int]:
    return [(start * 7 + i * i) % 256 for i in range(count)]


def queued_for(life: Life) -> list[str]:
    """What it queued for, longest first."""
    return [cause for cause in life.causes() if cause.startswith("queue: ")]


def notes(life: Life, phase: str, cause: str) -> list[str]:
    return [piece.note for piece in life.pieces if piece.phase == phase and piece.cause == cause]


# ── a mixed load ─────────────────────────────────────────────────────────────────────────────────


def test_the_pieces_of_every_life_follow_each_other_and_sum_to_its_e2e(loaded: Loaded) -> None:
    count = 0
    for name in loaded.seen:
        told = {
            line.event.choice: line.event.e2e_ns
            for line in loaded.run.requests[name]
            if isinstance(line.event, RequestTaken)
        }
        for life in lives(loaded.run, name):
            count += 1
            assert life.pieces[0].start_ns == life.received_ns
            assert all(a.end_ns == b.start_ns for a, b in pairwise(life.pieces)), name
            assert all(piece.took_ns > 0 for piece in life.pieces), name
            assert abs(sum(life.phases().values()) - told[life.who.choice]) < MS, name
    assert count == sum(len(seen.finishes) for seen in loaded.seen.values()) > REQUESTS


def test_a_life_lies_within_what_its_client_saw(loaded: Loaded) -> None:
    for name, seen in loaded.seen.items():
        for life in lives(loaded.run, name):
            assert life.end_ns is not None
            assert life.first_token_ns is not None
            assert seen.started_ns <= life.received_ns < life.first_token_ns <= life.end_ns <= seen.ended_ns


def test_every_life_has_the_phases_of_its_kind(loaded: Loaded) -> None:
    for name in loaded.seen:
        for life in lives(loaded.run, name):
            phases = [piece.phase for piece in life.pieces]
            order = [phase for phase, after in zip(phases, [*phases[1:], ""], strict=True) if phase != after]
            assert order[:4] == ["tokenize", "handoff", "queue", "prefill"], (name, order)
            assert order[-1] == "deliver", (name, order)
            assert life.finished is not None
            assert order.count("preempted") == life.finished.preemptions


def test_what_an_executor_did_is_found_in_running_phases_only(loaded: Loaded) -> None:
    """Steps are told with their members, so a running life accounts for executor time, never a waiting one."""
    for name in loaded.seen:
        for life in lives(loaded.run, name):
            computed = [p for p in life.pieces if p.cause in ("executor", "a neighbour's prefill")]
            assert computed, name
            assert all(p.phase in ("prefill", "decode", "recompute") for p in computed)


# ── one cause after the other ────────────────────────────────────────────────────────────────────


def test_who_waits_for_a_slot_is_told_so_and_behind_whom(small: Daemon) -> None:
    told = run_all(small, ("slot-a", [1], 100), ("slot-b", [2], 100), ("slot-c", [3], 2))
    (waiting,) = told["slot-c"]
    assert "queue: for slots" in queued_for(waiting)
    text = "\n".join(tell(Run(records(small.run_dir)), "chatcmpl-slot-c"))
    assert "all slots are taken" in text
    assert "1 requests got a slot before it: slot-b" in text, text
    assert "sequences were running: slot-a" in text, text


def test_who_waits_for_blocks_is_told_the_numbers(small: Daemon) -> None:
    told = run_all(small, ("room-a", distinct(1, 150), 50), ("room-b", distinct(2, 150), 2))
    (waiting,) = told["room-b"]
    needs = notes(waiting, "queue", "for blocks")
    assert needs
    assert all("needs" in note for note in needs)
    assert "queue: for blocks" in queued_for(waiting)


def test_a_preemption_names_who_took_the_blocks(small: Daemon) -> None:
    told = run_all(small, ("old", distinct(3, 90), 120), ("young", distinct(4, 90), 60))
    (young,) = told["young"]
    assert young.preempted
    event, _ = young.preempted[0]
    assert isinstance(event, RequestPreempted)
    assert event.by == "old"
    assert event.lost > 0
    phases = young.phases()
    assert phases["preempted"] > 0
    assert phases["recompute"] > 0
    (old,) = told["old"]
    assert not old.preempted


def test_a_miss_is_explained(small: Daemon) -> None:
    prompt = distinct(5, 40)
    kinds = []
    for name, ids in (
        ("new", prompt),
        ("same", prompt),
        ("differs", [*prompt[:20], *distinct(6, 20)]),
        ("ends", [*prompt, *distinct(7, 20)]),
        ("short", [7, 7]),
    ):
        (life,) = run_all(small, (name, ids, 2))[name]
        assert life.matched is not None
        kinds.append((life.matched.miss, life.matched.cached))
    assert kinds == [("new", 0), ("", 36), ("differs", 20), ("ends", 40), ("short", 0)]
    run_all(small, ("flood", distinct(8, 250), 2))
    (life,) = run_all(small, ("again", prompt, 2))["again"]
    assert life.matched is not None
    assert life.matched.miss == "evicted"
    assert life.matched.cached < 36


def test_a_neighbours_long_prefill_is_found_in_the_steps_of_a_decode(small: Daemon) -> None:
    told = run_all(small, ("quick", [9], 60), ("long", distinct(9, 120), 2))
    (quick,) = told["quick"]
    beside = notes(quick, "decode", "a neighbour's prefill")
    assert beside
    assert all(note.endswith("of long") for note in beside)


def test_a_killed_executor_is_named_by_whoever_lost_time_to_it(small: Daemon) -> None:
    pid = small.pids()["executor"]
    (life,) = run_all(small, ("survivor", [11], 200), kill=True)["survivor"]
    assert life.finish == "length"
    lost = notes(life, "recovery", "a process was lost")
    assert lost
    assert all(note == f"executor (pid {pid}) had ended" for note in lost)
    start, end = life.longest_gap or (0, 0)
    assert next(iter(life.causes(start, end))) == "recovery: a process was lost"
    slow = find_slow(Run(records(small.run_dir)), Threshold("itl", (end - start) // 2))
    assert ("survivor", 0) in [tuple(life.who) for _, life in slow["recovery: a process was lost"]]


@pytest.mark.parametrize("wrong", ["", "ttft", "ttft=5", "tpot=5ms", "ttft=-1ms"])
def test_a_wrong_threshold_is_refused_with_what_is_right(wrong: str) -> None:
    with pytest.raises(ValueError, match="ttft=500ms"):
        Threshold.parse(wrong)


def test_a_threshold_reads_its_unit() -> None:
    assert Threshold.parse("ttft=1.5s") == Threshold("ttft", 1_500_000_000)


# ── from events alone ────────────────────────────────────────────────────────────────────────────


def line(ts_ns: int, event: Event, role: str = "tokenizer") -> Line:
    return Line(ts_ns, 0, role, 1, event)


def refused(request_id: str) -> list[Line]:
    received = RequestReceived(request_id=request_id, trace_id="t", attempt=0, tenant="", received_ns=5)
    return [line(10, received), line(10, RequestFailed(request_id=request_id, code="never_fits", reason="too long"))]


def test_the_prompts_of_one_call_are_told_together_and_in_order() -> None:
    run = Run([*refused("abc-10"), *refused("abc-2"), *refused("abc-x"), *refused("abcd-1")])
    told = [text for text in tell(run, "cmpl-abc") if text.startswith("request")]
    assert [text.split()[1] for text in told] == ["abc-2", "abc-10"]
    assert [text.split()[1] for text in tell(run, "abc-10") if text.startswith("request")] == ["abc-10"]
    assert tell(run, "nobody") == []


def test_a_refusal_is_a_life_too() -> None:
    (life,) = lives(Run(refused("r")), "r")
    assert (life.finish, life.e2e_ns, life.phases()) == ("never_fits", 5, {"tokenize": 5})


def test_a_run_without_steps_still_tells_phases() -> None:
    with daemon("trace.steps=false") as running:
        running.wait_ready()
        (life,) = run_all(running, ("plain", [1, 2, 3], 5))["plain"]
    assert list(life.phases()) == ["tokenize", "handoff", "queue", "prefill", "decode", "deliver"]
    assert sum(life.phases().values()) == life.e2e_ns


def test_a_choice_that_waits_for_its_sibling_holds_up_nobody(small: Daemon) -> None:
    before = ended(small.run_dir)

    async def ask() -> None:
        async with Client.connect(small.run_dir) as client:
            await client.wait_ready(60)
            await one(client, "siblings", distinct(12, 60), 4, 2, {})

    anyio.run(ask)
    eventually("all ends are in the trace", lambda: ended(small.run_dir) == before + 2)
    first, second = lives(Run(records(small.run_dir)), "siblings")
    assert notes(second, "queue", "for parent")
    assert not notes(first, "queue", "for parent")
