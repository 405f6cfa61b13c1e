"""Under a mixed load with everything that delays a request, `trace show` and `trace slow` name what the test did.

One daemon, with small requests coming and going all the while; each test does one thing to it and asks.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from octavo.core.cli import main
from octavo.core.client.client import Client
from octavo.core.messages import Ids, Params
from octavo.core.trace.catalogue import (
    Event,
    RequestAdmitted,
    RequestFirstToken,
    RequestQueued,
    RequestReceived,
    RequestTaken,
    RequestTokenized,
    StepBound,
    StepCompleted,
    StepExecuted,
    StepPlanned,
)
from octavo.core.trace.life import Life, lives
from octavo.core.trace.read import Line, lines, records
from octavo.core.trace.run import Run
from octavo.core.trace.show import tell
from tests.processes.daemon import Daemon, daemon, eventually
from tests.trace.load import Seen, one, until_tokens

MS = 1_000_000


@pytest.fixture(scope="module")
def busy() -> Iterator[Daemon]:
    """Four slots, 128 blocks, and chunks of 16 tokens."""
    with daemon("kv.tokens=512", "scheduler.max_sequences=4", "scheduler.chunk_budget=16") as running:
        running.wait_ready()
        yield running


class Mixed:
    """Asks by name, beside small requests that never cease."""

    def __init__(self, running: Daemon, client: Client) -> None:
        self.running = running
        self.client = client
        self.seen: dict[str, Seen] = {}

    async def ask(self, name: str, ids: list[int], most: int, tenant: str = "") -> None:
        await one(self.client, name, ids, most, 1, self.seen, tenant)

    async def small(self) -> None:
        for i in range(10_000):
            await self.ask(f"small-{time.monotonic_ns()}-{i}", [i % 256], 6)


def told_whole(running: Daemon, name: str) -> bool:
    """Whether the scheduler has written its end, and the tokenizer that its client has it: each writes when it can."""
    of_it = {line["event"] for line in lines(running.run_dir) if line.get("request_id") == name}
    return {"request.finished", "request.taken"} <= of_it


def mixed(running: Daemon, act: Callable[[Mixed], Awaitable[None]]) -> None:
    """Run `act(mixed)` under the load; what it asked is in the trace when this returns."""

    async def all_of_it() -> None:
        async with Client.connect(running.run_dir) as client, anyio.create_task_group() as tasks:
            await client.wait_ready(60)
            load = Mixed(running, client)
            tasks.start_soon(load.small)
            await act(load)
            tasks.cancel_scope.cancel()
            asked.extend(name for name in load.seen if not name.startswith("small-"))

    asked: list[str] = []
    anyio.run(all_of_it)
    for name in asked:
        eventually(f"{name} is told whole", partial(told_whole, running, name))
    eventually("so is every step", running.is_written)


def life_of(running: Daemon, name: str) -> Life:
    (life,) = lives(Run(records(running.run_dir)), name)
    return life


def shown(running: Daemon, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["trace", *words, "--run", str(running.run_dir)]) == 0
    return capsys.readouterr().out


def distinct(start: int, count: int) -> list[int]:
    return [(start * 7 + i * i) % 256 for i in range(count)]


def test_a_long_prefill_is_named_by_the_decode_that_it_held_up(
    busy: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    async def act(load: Mixed) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.ask, "quick", [9], 120)
            await until_tokens(load.seen, "quick")
            tasks.start_soon(load.ask, "long", distinct(9, 160), 2)

    mixed(busy, act)
    text = shown(busy, capsys, "show", "chatcmpl-quick")
    assert re.search(r"a neighbour's prefill .*: step \d+: its next token, beside \d+ prefill tokens, ", text)
    beside = {piece.step for piece in life_of(busy, "quick").pieces if piece.by == "long"}
    computed = {line["step"] for line in busy.events("request.chunk") if line["request_id"] == "long"}
    assert beside
    assert beside <= computed


def test_a_preemption_names_who_took_the_blocks(busy: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(load: Mixed) -> None:
        async with anyio.create_task_group() as tasks:
            for name in ("old", "middle", "young"):
                tasks.start_soon(load.ask, name, distinct(ord(name[0]), 90), 160)
                await until_tokens(load.seen, name)

    mixed(busy, act)
    victim = next(name for name in ("young", "middle") if life_of(busy, name).preempted)
    text = shown(busy, capsys, "show", victim)
    assert re.search(r"step \d+ took its blocks for (old|middle|small-\S+) \(recompute\): \d+ tokens to compute", text)
    life = life_of(busy, victim)
    span = sum(p.took_ns for p in life.pieces if p.phase in ("preempted", "recompute")) // 2
    groups = shown(busy, capsys, "slow", "--over", f"e2e={span / MS}ms")
    assert victim in groups


def test_an_eviction_is_told_with_its_time_and_for_whom(busy: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = distinct(77, 40)

    async def act(load: Mixed) -> None:
        await load.ask("before", prompt, 2)
        await load.ask("flood", distinct(78, 480), 2)
        await load.ask("after", prompt, 2)

    mixed(busy, act)
    life, flood = life_of(busy, "after"), life_of(busy, "flood")
    assert life.matched is not None
    assert life.matched.miss == "evicted"
    assert flood.end_ns is not None
    assert flood.received_ns < life.matched.evicted_ns < flood.end_ns
    assert re.search(
        r"in the prefix tree: the next block was there, and was evicted \S+ ms before, by step \d+ for .*(flood|small)",
        shown(busy, capsys, "show", "after"),
    )


def test_another_tenants_prefix_is_the_reason_of_a_miss(busy: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(load: Mixed) -> None:
        await load.ask("theirs", distinct(90, 40), 2, "a")
        await load.ask("ours", distinct(90, 40), 2, "b")

    mixed(busy, act)
    text = shown(busy, capsys, "show", "ours")
    assert "0 of 40 tokens were in the prefix tree: another tenant or adapter has at least its first 4 tokens" in text
    assert "tenant b" in text


def test_a_killed_executor_is_the_cause_for_everyone_it_delayed(
    busy: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = {}

    async def act(load: Mixed) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.ask, "survivor", [11], 200)
            await until_tokens(load.seen, "survivor")
            killed["pid"] = busy.kill("executor", signal.SIGKILL)
            tasks.start_soon(load.ask, "newcomer", distinct(12, 30), 2)

    mixed(busy, act)
    survivor = life_of(busy, "survivor")
    start, end = survivor.longest_gap or (0, 0)
    named = f"executor (pid {killed['pid']}) had ended"
    assert re.search(rf"a process was lost.*: {re.escape(named)}", shown(busy, capsys, "show", "survivor"))
    assert f"longest time between tokens {(end - start) / MS:.2f} ms, mostly recovery: a process was lost" in shown(
        busy, capsys, "show", "survivor"
    )
    groups = shown(busy, capsys, "slow", "--over", f"itl={(end - start) / 2 / MS}ms")
    assert re.search(r"mostly recovery: a process was lost(\n {8}.*)*\n {8}survivor ", groups)


def test_a_stopped_executor_is_where_the_time_went(busy: Daemon) -> None:
    stopped = []

    async def act(load: Mixed) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.ask, "held", [13], 150)
            await until_tokens(load.seen, "held")
            busy.kill("executor", signal.SIGSTOP)
            stopped.append(time.monotonic_ns())
            await anyio.sleep(0.3)  # the delay to be explained
            stopped.append(time.monotonic_ns())
            busy.kill("executor", signal.SIGCONT)

    mixed(busy, act)
    life = life_of(busy, "held")
    gap = life.longest_gap
    assert gap is not None
    assert gap[1] - gap[0] > 250 * MS
    # Stopped while it computed, or before what it had computed was sent.
    cause = next(iter(life.causes(*stopped)))
    assert "executor" in cause or "result on its way" in cause


def test_a_client_that_does_not_take_its_tokens_is_called_slow(
    busy: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = {}

    async def act(load: Mixed) -> None:
        params = Params(max_tokens=5)
        async with await load.client.generate(Ids([14]), params, request_id="dawdler") as stream:
            while not stream.complete:
                await anyio.sleep(0.001)
            load.seen["dawdler"] = Seen(0)
            before = time.monotonic_ns()
            await anyio.sleep(0.1)  # what the client does instead
            waited["ns"] = time.monotonic_ns() - before
            async for _ in stream:
                pass

    mixed(busy, act)
    life = life_of(busy, "dawdler")
    assert life.taken is not None
    assert life.taken.held_ns >= life.taken.last_held_ns >= waited["ns"]
    assert life.causes()["deliver: the client had not taken it"] >= waited["ns"]
    assert re.search(
        r"as the client saw it: TTFT .* E2E .*; it was slow: a row lay", shown(busy, capsys, "show", "dawdler")
    )


def test_a_policy_that_takes_long_or_leaves_somebody_out_is_named() -> None:
    """From events alone: in step 3 policies took 5 of the 6 ms of planning, after a step without the choice."""
    s, k, e, t = "scheduler", "kv", "executor", "tokenizer"
    events: list[tuple[int, int, str, Event]] = [
        (0, 0, t, RequestReceived(request_id="r", trace_id="", attempt=0, tenant="", received_ns=0)),
        (0, 0, t, RequestTokenized(request_id="r", prompt_tokens=1, max_tokens=2, n=1, namespace="")),
        (0, 0, s, RequestQueued(request_id="r", trace_id="", attempt=0, prompt_tokens=1, n=1, ahead=0)),
        (
            0,
            0,
            s,
            RequestAdmitted(request_id="r", choice=0, step=1, slot=0, open_id=1, how="open", cached=0, waited_ns=0),
        ),
        *step(1, 0, [1]),
        (4, 0, s, RequestFirstToken(request_id="r", choice=0, step=1, since_queued_ns=4 * MS)),
        *step(2, 5, [2]),
        *step(3, 10, [1], planning=6, policies=5),
    ]
    assert {role for _, _, role, _ in events} == {s, k, e, t}
    run = Run([Line(at * MS, took * MS, role, 1, event) for at, took, role, event in events])
    (life,) = lives(run, "r")
    decode = {cause: took // MS for cause, took in life.causes(4 * MS).items()}
    assert decode == {
        "decode: left out": 6,
        "decode: policies": 5,
        "decode: until it is planned": 1,
        "decode: until the executor begins": 1,
        "decode: executor": 1,
        "decode: result on its way": 2,
    }
    told = "\n".join(tell(run, "r"))
    assert "1 steps were planned without it: the policies chose others" in told
    assert "they took 5.00 ms of the planning of step 3" in told


def step(
    number: int, at: int, open_ids: list[int], planning: int = 0, policies: int = 0
) -> list[tuple[int, int, str, Event]]:
    """Planned, bound at once, begun 1 ms later, computed for 1 ms, and its result 2 ms later with the scheduler."""
    bound = at + planning
    planned = StepPlanned(
        step=number, sequences=1, prefill_tokens=0, decode_tokens=1, opens=0, forks=0, releases=0, waiting=0, running=1,
        credit=9, policy_ns=policies * MS, open_ids=open_ids,
    )  # fmt: skip
    executed = StepExecuted(
        step=number, rows=1, tokens=1, started_ns=(bound + 1) * MS, execute_ns=MS, prefill_tokens=0, decodes=1,
        attention=1, kv_tokens=1,
    )  # fmt: skip
    kv = StepBound(
        step=number, allocated=0, free=9, evictable=0, evicted=0, copies=0, swapped_in=0, skipped=0, policy_ns=0
    )
    return [
        (at, planning, "scheduler", planned),
        (bound, 0, "kv", kv),
        (bound + 2, 0, "executor", executed),
        (bound + 4, 0, "scheduler", StepCompleted(step=number, new_tokens=1, latency_ns=0)),
    ]


def test_what_the_client_measured_is_an_event(busy: Daemon) -> None:
    async def act(load: Mixed) -> None:
        await load.ask("measured", [15], 9)
        await load.ask("single", [16], 1)

    mixed(busy, act)
    taken = {name: life_of(busy, name).taken for name in ("measured", "single")}
    several, single = taken["measured"], taken["single"]
    assert several is not None
    assert several.tokens == 9
    for measure in ("ttft", "itl", "tpot", "e2e"):
        assert getattr(several, f"{measure}_ns") > 0
        assert getattr(several, f"{measure}_off_ns") is not None
    assert several.ttft_off_ns is not None
    assert several.ttft_off_ns > 0  # the way to the client
    assert single is not None
    assert (single.tokens, single.tpot_ns, single.itl_ns, single.tpot_off_ns) == (1, None, None, None)
    assert isinstance(single, RequestTaken)


def test_a_wrong_run_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", "x", "--run", str(tmp_path)]) == 1
    assert "there is no trace in" in capsys.readouterr().err


def test_a_step_that_is_far_slower_than_others_is_the_executors_doing() -> None:
    """Ten steps of 1 ms and one of 20; a chunk of its own that takes as long is what it asked for."""
    s, t = "scheduler", "tokenizer"
    events: list[tuple[int, int, str, Event]] = [
        (0, 0, t, RequestReceived(request_id="r", trace_id="", attempt=0, tenant="", received_ns=0)),
        (
            0,
            0,
            s,
            RequestAdmitted(request_id="r", choice=0, step=1, slot=0, open_id=1, how="open", cached=0, waited_ns=0),
        ),
        (0, 0, s, RequestFirstToken(request_id="r", choice=0, step=0, since_queued_ns=0)),
    ]
    for number in range(1, 11):
        events += step(number, 5 * number, [1])
    slow = step(11, 60, [1])
    executed = slow[2][3]
    assert isinstance(executed, StepExecuted)
    slow[2] = (*slow[2][:3], msgspec.structs.replace(executed, execute_ns=20 * MS))
    slow[3] = (85, *slow[3][1:])
    run = Run([Line(at * MS, took * MS, role, 1, event) for at, took, role, event in [*events, *slow]])
    (life,) = lives(run, "r")
    (piece,) = (piece for piece in life.pieces if piece.cause == "executor, slower than usual")
    assert (piece.took_ns, piece.step) == (20 * MS, 11)
    assert "20.00 ms against 1.00" in piece.note
