"""`/metrics` of a real daemon: always the same names, only growing, and exactly what its clients did."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from itertools import pairwise

import anyio
import httpx
import pytest

from octavo.core.client.stream import Piece, ServiceUnavailable, Stream
from octavo.core.control import ActorStatus, Status
from octavo.core.messages import Params, Prompt, Row, Text, Usage
from octavo.plugins.metrics import grafana
from octavo.plugins.metrics.families import render
from octavo.plugins.metrics.meter import OUTCOMES, Meter, Numbers
from octavo.plugins.metrics.service import Service
from tests.processes.daemon import Daemon, daemon, eventually

Page = dict[str, float]


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    with daemon(gateway=True) as running:
        running.wait_ready()
        yield running


def scrape(running: Daemon, query: str = "") -> Page:
    answer = httpx.get(f"{running.info().address}/metrics{query}", timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return read(answer.text)


def read(text: str) -> Page:
    """Samples by name and labels; each must be there once."""
    page: Page = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            key, value = line.rsplit(" ", 1)
            assert key not in page
            page[key] = float(value)
    return page


def counts(page: Page) -> Page:
    grows = ("_total{", "_bucket{", "_count{", "_sum{")
    return {key: value for key, value in page.items() if any(part in key for part in grows)}


def complete(running: Daemon, **asked: object) -> httpx.Response:
    body = {"prompt": "tell me", "max_tokens": 12, "temperature": 0, **asked}
    return httpx.post(f"{running.info().address}/v1/completions", json=body, timeout=60)


def test_the_names_are_always_there_and_what_counts_only_grows(served: Daemon) -> None:
    before = scrape(served)
    assert all(value >= 0 for value in before.values())
    pages = [before]
    for asked in ({}, {"n": 2}, {"max_tokens": 1}, {"prompt": "x" * 9000}):
        complete(served, **asked)
        pages.append(scrape(served))
    served.wait_replaced("kv", served.kill("kv", signal.SIGKILL))
    pages.append(scrape(served))
    for earlier, later in pairwise(pages):
        assert later.keys() == earlier.keys()
        shrunk = {key for key, value in counts(earlier).items() if later[key] < value}
        assert not shrunk


def test_the_names_are_the_same_in_every_mode(served: Daemon) -> None:
    modes = ("kv.prefix_cache=false", "trace.enabled=false", "scheduler.depth=1", "policies.speculation=fixed")
    with daemon(*modes, gateway=True) as other:
        other.wait_ready()
        assert scrape(other).keys() == scrape(served).keys()


def test_the_numbers_are_exactly_what_the_clients_did(served: Daemon) -> None:
    before = scrape(served)
    prompt = output = 0
    for most in (1, 5, 9):
        usage = complete(served, max_tokens=most, ignore_eos=True).json()["usage"]
        prompt += usage["prompt_tokens"]
        output += usage["completion_tokens"]
    assert complete(served, prompt="y" * 9000).status_code == 400
    after = scrape(served)

    def grown(key: str) -> float:
        return after[key] - before[key]

    assert grown("octavo_requests_total{}") == 4
    assert grown('octavo_request_outcomes_total{outcome="length"}') == 3
    assert grown('octavo_request_outcomes_total{outcome="refused"}') == 1
    assert grown("octavo_prompt_tokens_total{}") == prompt
    assert grown("octavo_output_tokens_total{}") == output == 15
    assert grown("octavo_time_to_first_token_seconds_count{}") == 3
    assert grown("octavo_request_seconds_count{}") == 3
    outcomes = sum(after[f'octavo_request_outcomes_total{{outcome="{outcome}"}}'] for outcome in OUTCOMES)
    assert outcomes + after["octavo_requests_open{}"] == after["octavo_requests_total{}"]
    assert after["octavo_requests_open{}"] == 0


def test_the_actors_are_there_and_the_pool_adds_up(served: Daemon) -> None:
    complete(served)

    def after_a_heartbeat() -> Page | None:
        page = scrape(served)
        return page if page["octavo_steps_total{}"] else None

    page = eventually("a heartbeat after the steps", after_a_heartbeat)
    assert all(page[f'octavo_actor_ready{{actor="{role}"}}'] == 1 for role in served.actors() if role != "supervisor")
    assert page['octavo_service_state{state="ready"}'] == 1
    parts = sum(page[f'octavo_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "used"))
    assert parts == page["octavo_kv_blocks_pool{}"] == 1024


def test_vllms_names_tell_the_same(served: Daemon) -> None:
    complete(served)
    ours, theirs = scrape(served), scrape(served, "?names=vllm")
    assert all(key.startswith("vllm:") for key in theirs)
    assert theirs["vllm:generation_tokens_total{}"] == ours["octavo_output_tokens_total{}"] > 0
    assert theirs['vllm:request_success_total{finished_reason="length"}'] > 0
    assert {"vllm:num_requests_running{}", "vllm:num_requests_waiting{}"} <= theirs.keys()
    assert 0 <= theirs["vllm:kv_cache_usage_perc{}"] <= 1
    assert theirs['vllm:cache_config_info{block_size="4",num_gpu_blocks="1024"}'] == 1


VLLM = {
    "counters": "prompt_tokens generation_tokens prefix_cache_queries prefix_cache_hits num_preemptions "
    "request_success prompt_tokens_cached admission_rejections spec_decode_num_accepted_tokens",
    "gauges": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "histograms": "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens "
    "iteration_tokens_total request_params_n request_params_max_tokens request_num_preemptions",
}
"""What dashboards, routers and endpoint pickers made for vLLM 0.32 read."""


def test_every_name_of_vllm_is_there_and_the_same_in_every_mode(served: Daemon) -> None:
    names = {key.partition("{")[0].removeprefix("vllm:") for key in scrape(served, "?names=vllm")}
    wanted = {f"{name}_total" for name in VLLM["counters"].split()} | set(VLLM["gauges"].split())
    for name in VLLM["histograms"].split():
        wanted |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    assert wanted <= names


def test_grafanas_dashboard_asks_for_what_is_there(served: Daemon) -> None:
    assert grafana.TARGET.read_text(encoding="utf-8") == grafana.text(), "run: python -m octavo.plugins.metrics.grafana"
    there = {key.partition("{")[0] for key in scrape(served)}
    for panel in grafana.PANELS:
        for query in panel.queries.values():
            asked = set(re.findall(r"octavo_\w+", query))
            assert asked
            assert asked <= there


# ── without a daemon ─────────────────────────────────────────────────────────────────────────────


class Engine:
    """Gives what it is told to give."""

    def __init__(self) -> None:
        self.stream = Stream("r", 2, lambda _: None)
        self.gone = False

    async def generate(self, prompt: Prompt, params: Params) -> Stream:
        if self.gone:
            raise ServiceUnavailable("gone")
        return self.stream


async def opened(numbers: Numbers, engine: Engine) -> Stream:
    return await Meter(engine, numbers).generate(Text("x"), Params(n=2))


def row(choice: int, ids: list[int], finish: str | None = None) -> Row:
    return Row("r", choice, 0, 0, ids, "", finish, usage=Usage(5, 1, 2) if finish else None)


async def take(stream: Stream, count: int) -> list[Piece]:
    return [await anext(stream) for _ in range(count)]


def page_of(numbers: Numbers) -> Page:
    return read(render(numbers.families(), {}))


def ended_as(numbers: Numbers) -> dict[str, float]:
    return {outcome: numbers.outcomes.total(outcome) for outcome in OUTCOMES if numbers.outcomes.total(outcome)}


def test_a_request_that_its_client_left_is_cancelled() -> None:
    async def leave() -> Numbers:
        numbers, engine = Numbers(), Engine()
        async with await opened(numbers, engine) as stream:
            engine.stream.feed(row(0, [1]))
            await take(stream, 1)
            assert page_of(numbers)["octavo_requests_open{}"] == 1
        return numbers

    numbers = anyio.run(leave)
    assert ended_as(numbers) == {"cancelled": 1}
    assert numbers.ttft.count == 1
    assert numbers.e2e.count == 0
    assert page_of(numbers)["octavo_requests_open{}"] == 0


def test_of_two_choices_the_worse_end_counts_and_only_once() -> None:
    async def finish() -> Numbers:
        numbers, engine = Numbers(), Engine()
        async with await opened(numbers, engine) as stream:
            for one in (row(0, [1]), row(1, [1]), row(0, [2]), row(1, [], "error"), row(0, [], "stop")):
                engine.stream.feed(one)
            await take(stream, 5)
        return numbers

    numbers = anyio.run(finish)
    assert ended_as(numbers) == {"error": 1}
    assert numbers.itl.count == 1
    assert (numbers.prompt.total(), numbers.cached.total(), numbers.output.total()) == (5, 2, 3)


def test_a_service_that_is_away_is_counted_too() -> None:
    async def refuse() -> Numbers:
        numbers, engine = Numbers(), Engine()
        engine.gone = True
        with pytest.raises(ServiceUnavailable):
            await opened(numbers, engine)
        return numbers

    assert ended_as(anyio.run(refuse)) == {"unavailable": 1}


def test_a_count_goes_on_over_a_restart_of_its_process() -> None:
    service = Service()
    for pid, steps in ((1, 10), (1, 15), (2, 3), (2, 7), (3, 0)):
        actor = ActorStatus(
            role="executor",
            name="executor",
            pid=pid,
            generation=1,
            state="ready",
            restarts=0,
            progress_age_s=0.0,
            stats={"steps": steps},
        )
        service.take(Status(state="ready", epoch=1, actors=[actor]))
    assert service.steps.total() == 22
