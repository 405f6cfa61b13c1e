"""What a key may ask for: by the minute, at a time, and waiting for its turn; a 429 says which limit it was."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from octavo.plugins.openai.tenants.keys import Limits
from octavo.plugins.openai.tenants.limits import Allowance
from octavo.plugins.openai.tenants.turns import NoTurn, Turns
from tests.gateway.conftest import FakeEngine
from tests.gateway.tenants import BODY, CHAT, Clock, bearer, guarded, make
from tests.gateway.test_errors import error

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limited(response: httpx.Response, limit: str) -> None:
    """429, with the limit named and a time to come again."""
    told = error(response, 429)
    assert told["code"] == "rate_limit_exceeded"
    assert told["param"] == limit
    assert limit in told["message"]
    assert int(response.headers["retry-after"]) >= 1


async def test_requests(file: Path, engine: FakeEngine, clock: Clock) -> None:
    two = make(file, "two", "--requests-per-minute", "2")
    async with guarded(file, engine, clock) as (http, _):
        answers = [await http.post(CHAT, json=BODY, headers=bearer(two)) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        limited(answers[2], "requests_per_minute")
        assert answers[2].headers["retry-after"] == "30"
        assert (await http.get("/v1/models", headers=bearer(two))).status_code == 200, "only what is posted counts"
        clock.pass_(30)
        assert (await http.post(CHAT, json=BODY, headers=bearer(two))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limit", "most", "answers"),
    [("tokens", 10, 2), ("prompt-tokens", 3, 2), ("output-tokens", 14, 2), ("output-tokens", 7, 1)],
)
async def test_tokens(
    file: Path, engine: FakeEngine, clock: Clock, stream: bool, limit: str, most: int, answers: int
) -> None:
    """An answer is let through while anything is left, then costs what it costs: 2 prompt tokens and 7 of output."""
    assert len(engine.answer) == 7
    few = make(file, "few", f"--{limit}-per-minute", str(most))
    body = {**BODY, "stream": stream}
    async with guarded(file, engine, clock) as (http, _):
        for _ in range(answers):
            assert (await http.post(CHAT, json=body, headers=bearer(few))).status_code == 200
        third = await http.post(CHAT, json=body, headers=bearer(few))
        limited(third, f"{limit.replace('-', '_')}_per_minute")
        assert third.headers[f"x-ratelimit-remaining-{limit}"] == "0"
        clock.pass_(int(third.headers["retry-after"]))
        assert (await http.post(CHAT, json=body, headers=bearer(few))).status_code == 200


async def test_tokens_count_as_they_come_not_when_an_answer_ends(file: Path, engine: FakeEngine, clock: Clock) -> None:
    engine.silent = True
    few = make(file, "few", "--output-tokens-per-minute", "3")
    async with guarded(file, engine, clock) as (http, accounts), anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: http.post(CHAT, json=BODY, headers=bearer(few)))
        await until(lambda: engine.streams)
        (stream,) = engine.streams.values()
        engine.answer = "abcdef"
        engine.play(stream, engine.seen[0][2], [1, 2])
        key = accounts.find(few)
        assert key is not None
        await until(lambda: accounts.open(key).headers()["x-ratelimit-remaining-output-tokens"] == "0")
        limited(await http.post(CHAT, json=BODY, headers=bearer(few)), "output_tokens_per_minute")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_concurrency_and_queue(file: Path, engine: FakeEngine, clock: Clock, stream: bool) -> None:
    """One is answered, one waits, the third is refused; whose client leaves gives up its place."""
    engine.silent = True
    one = make(file, "one", "--concurrency", "1", "--queue", "1")
    alone = make(file, "alone", "--concurrency", "1")
    body, got = {**BODY, "stream": stream}, list[int]()
    async with guarded(file, engine, clock) as (http, _), anyio.create_task_group() as tasks:

        async def ask(key: str) -> None:
            got.append((await http.post(CHAT, json=body, headers=bearer(key))).status_code)

        tasks.start_soon(ask, one)
        await until(lambda: len(engine.streams) == 1)
        with anyio.move_on_after(0.05):  # it waits, and leaves
            await ask(one)
        tasks.start_soon(ask, one)
        tasks.start_soon(ask, alone)
        await until(lambda: len(engine.streams) == 2)
        refused = await http.post(CHAT, json=body, headers=bearer(one))
        limited(refused, "queue")
        limited(await http.post(CHAT, json=body, headers=bearer(alone)), "concurrency")
        assert not got
        for _ in range(3):
            for request_id, _, params in list(engine.seen):
                if not engine.streams[request_id].complete:
                    engine.play(engine.streams[request_id], params, [1, 2])
            await anyio.wait_all_tasks_blocked()
        await until(lambda: len(got) == 3)
        assert got == [200] * 3
        assert len(engine.seen) == 3


async def test_a_request_for_several_prompts_counts_as_so_many(file: Path, engine: FakeEngine, clock: Clock) -> None:
    engine.silent = True
    three = make(file, "three", "--concurrency", "3")
    async with guarded(file, engine, clock) as (http, _), anyio.create_task_group() as tasks:
        for prompts in (["a", "b"], ["a"]):
            tasks.start_soon(partial(http.post, "/v1/completions", json={"prompt": prompts}, headers=bearer(three)))
        await until(lambda: len(engine.streams) == 3)
        limited(await http.post("/v1/completions", json={"prompt": "a"}, headers=bearer(three)), "concurrency")
        tasks.cancel_scope.cancel()


async def test_turns_come_in_order_and_none_is_lost(anyio_backend: str) -> None:
    turns, order = Turns(2, 100), list[int]()

    async def use(number: int, size: int) -> None:
        async with turns.turn(size):
            assert turns.running <= 2
            order.append(number)
            await anyio.sleep(0)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(use, number, 1 + number % 5)
            await anyio.wait_all_tasks_blocked() if number % 7 == 0 else None
    assert order == list(range(20)), "a large one is not overtaken"
    assert (turns.running, turns.waiting) == (0, 0)
    for cancelled in range(4):  # called and cancelled in the same moment, or before
        async with anyio.create_task_group() as holding:
            holding.start_soon(use, 0, 2)
            await anyio.sleep(0)
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(use, 1, 1)
                for _ in range(cancelled):
                    await anyio.sleep(0)
                waiting.cancel_scope.cancel()
        assert (turns.running, turns.waiting) == (0, 0)
    full = Turns(1, 0)
    async with full.turn(1):
        with pytest.raises(NoTurn, match="concurrency"):
            async with full.turn(1):
                pytest.fail("there is no turn")
    assert full.running == 0


def test_an_allowance_fills_with_time() -> None:
    allowance = Allowance(Limits(requests_per_minute=60, tokens_per_minute=600), now=0.0)
    assert [allowance.take_request(0.0) for _ in range(60)] == [None] * 60
    assert allowance.take_request(0.0) == ("requests_per_minute", 1.0)
    assert allowance.take_request(1.0) is None
    allowance.spend(200, 1000, 1.0)  # an answer longer than all that was left: a debt
    refused = allowance.take_request(30.0)
    assert refused is not None
    what, wait = refused
    assert what == "tokens_per_minute"
    assert wait == pytest.approx((1 + 1200 - 600 - 290) / 10)
    assert allowance.take_request(30.0 + wait + 0.001) is None


async def until(probe: Any) -> None:
    with anyio.fail_after(10):
        while not probe():
            await anyio.sleep(0.002)
