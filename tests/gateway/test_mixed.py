"""Thirty-two requests of every kind at once, in a pool too small for them: each ends as it does alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from tests.processes.daemon import Daemon, daemon, eventually

pytestmark = pytest.mark.anyio

ROUTE = "/v1/completions"
PLAIN = {"temperature": 0, "max_tokens": 120}
SEEDED = {"seed": 11, "n": 3, "max_tokens": 60}
NEVER_FITS = {"prompt": [5] * 1000, "max_tokens": 100}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    with daemon("kv.tokens=512", "scheduler.max_sequences=16", gateway=True) as running:
        running.wait_ready()
        yield running


def prompt_of(i: int) -> str:
    return f"{i} " * (i % 9 + 1)


def body_of(i: int) -> dict[str, Any]:
    kinds = (PLAIN, {**PLAIN, "stream": True}, {**SEEDED, "stream": True}, SEEDED)
    return {"prompt": prompt_of(i), **kinds[i % 4]}


async def texts(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[int, str]:
    """The text of each choice; fails unless every choice has one finish."""
    response = await client.post(ROUTE, json=body)
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n") if body.get("stream") else [f"data: {response.text}"]
    found: dict[int, str] = {}
    finishes = []
    for frame in frames:
        if frame.startswith("data: {"):
            for choice in json.loads(frame[6:])["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
                finishes += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(finishes) == list(range(body.get("n", 1)))
    return found


async def leave_half_way(client: httpx.AsyncClient, i: int) -> None:
    body = {"prompt": prompt_of(i), "max_tokens": 400, "stream": True, "n": 2}
    async with client.stream("POST", ROUTE, json=body) as response:
        lines = response.aiter_lines()
        for _ in range(10):
            await anext(lines)


async def test_each_ends_as_it_does_alone_and_nothing_is_left(small: Daemon) -> None:
    address = small.info().address
    assert address is not None
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        alone = [await texts(client, body_of(i)) for i in range(22)]
        stop = alone[0][0][40:43]
        stopped = {"prompt": prompt_of(0), **PLAIN, "stop": stop, "stream": True}
        together: list[dict[int, str]] = [{} for _ in alone]
        refused: list[httpx.Response] = []
        cut: list[dict[int, str]] = []

        async def one(i: int) -> None:
            together[i] = await texts(client, body_of(i))

        async def never_fits() -> None:
            refused.extend([await client.post(ROUTE, json={**NEVER_FITS, "stream": s}) for s in (False, True)])

        async def stops() -> None:
            cut.append(await texts(client, stopped))

        async with anyio.create_task_group() as tasks:
            for i in range(22):
                tasks.start_soon(one, i)
            for i in range(6):
                tasks.start_soon(leave_half_way, client, i)
            for _ in range(3):
                tasks.start_soon(stops)
            tasks.start_soon(never_fits)
    assert together == alone
    assert cut == [{0: alone[0][0].partition(stop)[0]}] * 3
    assert [response.status_code for response in refused] == [400, 400]
    assert {response.json()["error"]["code"] for response in refused} == {"never_fits"}
    small.told("request.preempted")  # else the pool was large enough for all
    await anyio.to_thread.run_sync(eventually, "nothing is held", lambda: nothing_held(small))


def nothing_held(small: Daemon) -> bool:
    actors = small.actors()
    scheduler, kv = actors["scheduler"].stats, actors["kv"].stats
    idle = scheduler.get("running") == scheduler.get("waiting") == kv.get("used_blocks") == 0
    return idle and kv["free_blocks"] + kv["cached_blocks"] == kv["total_blocks"]
