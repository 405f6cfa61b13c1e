"""Metrics, events and the clients' own counts of one run agree exactly: `--counted-requests 10000` for a long one,
whose figures are written to tests/results/counts.md."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import msgspec
import pytest

from octavo.core.trace.catalogue import (
    KvEvicted,
    RequestCancelled,
    RequestDelivered,
    RequestFailed,
    RequestFinished,
    RequestFirstToken,
    RequestPreempted,
    RequestReceived,
    RequestTaken,
    StepExecuted,
)
from octavo.core.trace.life import lives
from octavo.core.trace.read import lines, records
from octavo.core.trace.run import Run
from octavo.plugins.metrics.meter import OUTCOMES
from tests.metrics.test_service import Page, scrape
from tests.processes.daemon import Daemon, daemon, eventually

MS = 1_000_000
AT_ONCE = 24
DEFAULT = 240


class Counted(NamedTuple):
    """A finished run, and what its clients counted."""

    page: Page
    run: Run
    clients: Counter[str]


async def ask(http: httpx.AsyncClient, number: int, rng: random.Random, clients: Counter[str]) -> None:
    """One request: short or long, streamed or not, one or two choices, and now and then one that is refused."""
    prompt = "".join(chr(rng.randrange(32, 127)) for _ in range(rng.choice((3, 20, 150))))
    prompt = "the same beginning, which is cached; " + prompt if number % 3 == 0 else prompt
    body: dict[str, Any] = {
        "prompt": "x" * 9000 if number % 40 == 7 else prompt,
        "max_tokens": rng.choice((1, 4, 12)),
        "n": 2 if number % 10 == 0 else 1,
        "ignore_eos": True,
        "stream": number % 4 == 1,
    }
    clients["requests"] += 1
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            data = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: {")]
        chunks = [msgspec.json.decode(text) for text in data]
        usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk.get("choices", ())]
    else:
        answer = await http.post("/v1/completions", json=body)
        whole = answer.json()
        usage, ends = whole.get("usage"), [choice["finish_reason"] for choice in whole.get("choices", ())]
    if answer.status_code == 400 or usage is None:
        clients["refused"] += 1
        return
    clients["finished"] += 1
    clients["choices"] += sum(end is not None for end in ends)
    clients["prompt"] += usage["prompt_tokens"]
    clients["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
    clients["output"] += usage["completion_tokens"]


async def load(address: str, count: int, clients: Counter[str]) -> None:
    rng = random.Random(5)
    limit = anyio.CapacityLimiter(AT_ONCE)
    # A connection is given up here before the server may close it, just as it is used again.
    limits = httpx.Limits(max_connections=AT_ONCE, keepalive_expiry=1)
    async with (
        httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http,
        anyio.create_task_group() as tasks,
    ):

        async def one(number: int) -> None:
            async with limit:
                await ask(http, number, rng, clients)

        for number in range(count):
            tasks.start_soon(one, number)


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest) -> Counted:
    count = int(request.config.getoption("--counted-requests") or DEFAULT)
    clients: Counter[str] = Counter()
    sets = ("kv.tokens=2048", "scheduler.max_sequences=16", "policies.speculation=off")
    with daemon(*sets, gateway=True) as running:
        running.wait_ready()
        anyio.run(load, str(running.info().address), count, clients)
        page = settled(running, clients)
        run = Run(records(running.run_dir))
    return Counted(page, run, clients)


def settled(running: Daemon, clients: Counter[str]) -> Page:
    """The page once the trace has all ends, and the actors' numbers have come with a heartbeat."""

    def ends() -> bool:
        names = Counter(line["event"] for line in lines(running.run_dir))
        return names["request.taken"] == names["request.finished"] == clients["choices"]

    def still() -> Page | None:
        written = list(lines(running.run_dir))
        steps = sum(line["event"] == "step.executed" for line in written)
        evicted = sum(line["blocks"] for line in written if line["event"] == "kv.evicted")
        page = scrape(running)
        told = page["octavo_steps_total{}"], page["octavo_kv_evicted_blocks_total{}"]
        return page if told == (steps, evicted) else None

    eventually("every end is in the trace", ends)
    return eventually("the heartbeats of executor and KV-manager have told the last step", still)


def of(run: Run, kind: type) -> list[Any]:
    return [line.event for line in run.lines if isinstance(line.event, kind)]


def test_requests_are_counted_alike(counted: Counted) -> None:
    page, run, clients = counted
    received = [event for event in of(run, RequestReceived) if event.attempt == 0]
    assert len(received) == page["octavo_requests_total{}"] == clients["requests"]
    refused = page['octavo_request_outcomes_total{outcome="refused"}']
    assert len(of(run, RequestFailed)) == refused == clients["refused"] > 0
    done = sum(page[f'octavo_request_outcomes_total{{outcome="{outcome}"}}'] for outcome in ("stop", "length"))
    assert done == page["octavo_request_seconds_count{}"] == clients["finished"]
    assert sum(page[f'octavo_request_outcomes_total{{outcome="{outcome}"}}'] for outcome in OUTCOMES) == len(received)
    assert page["octavo_requests_open{}"] == 0
    assert not of(run, RequestCancelled)
    for kind in (RequestFinished, RequestDelivered, RequestTaken):
        assert len(of(run, kind)) == clients["choices"] > clients["finished"]


def test_tokens_are_counted_alike(counted: Counted) -> None:
    page, run, clients = counted
    finished = of(run, RequestFinished)
    assert sum(event.output_tokens for event in finished) == clients["output"]
    assert sum(event.output_tokens for event in of(run, RequestDelivered)) == clients["output"]
    assert (
        sum(event.tokens for event in of(run, RequestTaken))
        == clients["output"]
        == page["octavo_output_tokens_total{}"]
    )
    firsts = [event for event in finished if event.choice == 0]
    assert sum(event.prompt_tokens for event in firsts) == clients["prompt"] == page["octavo_prompt_tokens_total{}"]
    assert sum(event.cached for event in firsts) == clients["cached"] == page["octavo_cached_tokens_total{}"] > 0


def test_what_was_measured_is_counted_alike(counted: Counted) -> None:
    page, run, clients = counted
    gave = {event.request_id for event in of(run, RequestFirstToken)}
    assert len(gave) == page["octavo_time_to_first_token_seconds_count{}"] == clients["finished"]
    gaps = sum(event.rows - 1 for event in of(run, RequestTaken))
    assert gaps == page["octavo_inter_token_seconds_count{}"] > 0
    several = sum(event.tokens > 1 for event in of(run, RequestTaken))
    assert several == page["octavo_time_per_output_token_seconds_count{}"] > 0
    assert page["octavo_request_prompt_tokens_count{}"] == clients["finished"]
    for stage in ("queue", "prefill", "decode", "inference"):
        assert page[f"octavo_{stage}_seconds_count{{}}"] == clients["choices"]
    assert page["octavo_request_output_tokens_sum{}"] == clients["output"]
    assert page["octavo_request_preemptions_sum{}"] == page["octavo_preemptions_total{}"]
    assert page["octavo_request_n_count{}"] == clients["requests"]
    tenants = [value for name, value in page.items() if name.startswith("octavo_tenant_requests_total")]
    assert sum(tenants) == clients["requests"]


def test_the_engines_own_numbers_are_those_of_its_events(counted: Counted) -> None:
    page, run, _ = counted
    executed = of(run, StepExecuted)
    assert page["octavo_steps_total{}"] == page["octavo_step_tokens_count{}"] == len(executed)
    assert page["octavo_step_tokens_sum{}"] == sum(event.prefill_tokens + event.decodes for event in executed)
    assert page["octavo_preemptions_total{}"] == len(of(run, RequestPreempted))
    assert page["octavo_kv_evicted_blocks_total{}"] == sum(event.blocks for event in of(run, KvEvicted)) > 0


def test_every_life_sums_to_what_its_client_waited(
    counted: Counted, root: Path, request: pytest.FixtureRequest
) -> None:
    checked, worst = 0, 0
    for name in counted.run.requests:
        for life in lives(counted.run, name):
            if life.taken is not None:
                checked += 1
                assert all(a.end_ns == b.start_ns for a, b in pairwise(life.pieces)), name
                worst = max(worst, abs(sum(life.phases().values()) - life.taken.e2e_ns))
    assert checked == counted.clients["choices"]
    assert worst < MS
    if request.config.getoption("--counted-requests"):
        write_result(root, counted, worst)


def write_result(root: Path, counted: Counted, worst_ns: int) -> None:
    rows = "\n".join(f"| {name} | {count} |" for name, count in sorted(counted.clients.items()))
    events = len(counted.run.lines)
    (root / "tests/results/counts.md").write_text(
        "# Metrics, events and clients agree\n\n"
        "Written by `pytest tests/metrics/test_agree.py --counted-requests N`: ghost executor, HTTP, "
        f"{AT_ONCE} requests at a time, a pool too small for them.\n\n"
        f"`/metrics`, the {events} events of the trace and the clients counted the same, exactly:\n\n"
        f"| counted by the clients | |\n|---|--:|\n{rows}\n\n"
        f"| counted by `/metrics` and by events | |\n|---|--:|\n"
        f"| steps | {counted.page['octavo_steps_total{}']:.0f} |\n"
        f"| preemptions | {counted.page['octavo_preemptions_total{}']:.0f} |\n"
        f"| evicted blocks | {counted.page['octavo_kv_evicted_blocks_total{}']:.0f} |\n\n"
        f"The pieces of every choice's life sum to the time that its client waited, within {worst_ns / MS:.3f} ms.\n"
    )
