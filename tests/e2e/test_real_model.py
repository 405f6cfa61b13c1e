"""The main job, on the default model over HTTP: six processes serve it, and whoever dies, the answers are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from octavo.core.trace.show import request_life
from tests.processes.daemon import Daemon, daemon, eventually

pytestmark = pytest.mark.anyio

MODEL = "SmolLM2-135M-Instruct"
STREAMS: list[dict[str, Any]] = [
    {"prompt": "The lighthouse keeper climbed the stairs and", "temperature": 0},
    {"prompt": "def fibonacci(n):\n", "temperature": 0},
    {"prompt": "Once upon a time", "temperature": 0.8, "top_p": 0.95, "seed": 7},
    {"prompt": "Ein kurzer Satz:", "temperature": 1.0, "top_k": 40, "seed": 8, "repetition_penalty": 1.1},
]
TOKENS = 40
SIZES = ("kv.block_size=16", "scheduler.chunk_budget=32", "supervisor.max_restarts=20")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    """Small enough that prompts are chunked, large enough that nothing is preempted."""
    with daemon(*SIZES, gateway=True, model="default") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def official(served: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address(served)}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def address(running: Daemon) -> str:
    found = running.info().address
    assert found is not None
    return found


def nothing_held(running: Daemon) -> bool:
    actors = running.actors()
    scheduler, kv = actors["scheduler"].stats, actors["kv"].stats
    idle = scheduler.get("running") == scheduler.get("waiting") == kv.get("used_blocks") == 0
    return idle and kv["free_blocks"] + kv["cached_blocks"] == kv["total_blocks"]


async def read(
    client: httpx.AsyncClient, body: dict[str, Any], after: int = 0, begun: anyio.Event | None = None
) -> str:
    """The text of a stream; `begun` is set when `after` pieces have come, of few tokens or of many, or all."""
    text, pieces, finish = "", 0, None
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": TOKENS}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                finish = choice["finish_reason"] or finish
                pieces += 1
            if begun is not None and pieces >= after:
                begun.set()
    if begun is not None:
        begun.set()
    assert finish in ("stop", "length")
    return text


async def read_all(running: Daemon, kill: str | None = None, after: int = 0) -> list[str]:
    """All streams at once; `kill` an actor when one of them has got `after` pieces."""
    texts = [""] * len(STREAMS)
    begun = anyio.Event()

    async def one(client: httpx.AsyncClient, i: int) -> None:
        texts[i] = await read(client, STREAMS[i], after, begun if i == after % len(STREAMS) else None)

    with anyio.fail_after(180):
        async with (
            httpx.AsyncClient(base_url=address(running), timeout=120) as client,
            anyio.create_task_group() as tasks,
        ):
            for i in range(len(STREAMS)):
                tasks.start_soon(one, client, i)
            if kill is not None:
                await begun.wait()
                pid = await anyio.to_thread.run_sync(running.kill, kill)
                await anyio.to_thread.run_sync(running.wait_replaced, kill, pid)
    return texts


@pytest.fixture(scope="module")
def undisturbed(served: Daemon) -> list[str]:
    return anyio.run(read_all, served)


def test_the_official_client_lists_models_chats_and_streams(official: openai.OpenAI) -> None:
    assert [model.id for model in official.models.list()] == [MODEL]
    question: Any = [{"role": "user", "content": "What is 2+2?"}]
    whole = official.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=40)
    assert "4" in (whole.choices[0].message.content or "")
    chunks = list(
        official.chat.completions.create(
            model=MODEL,
            messages=question,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 32  # the first call's prompt: two full blocks of its 37 tokens


def test_token_ids_continue_as_their_text_does(official: openai.OpenAI, served: Daemon) -> None:
    text = "The capital of France is"
    ids = httpx.post(f"{address(served)}/tokenize", json={"prompt": text}).json()["tokens"]
    by_text, by_ids = (
        official.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0) for prompt in (text, ids)
    )
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("role", ["executor", "kv", "scheduler", "tokenizer"])
async def test_streams_go_on_to_the_same_text_after_a_kill(served: Daemon, undisturbed: list[str], role: str) -> None:
    after = random.Random(role).randrange(1, 4)  # so many pieces there are, however many tokens are told together
    assert await read_all(served, role, after) == undisturbed
    await anyio.to_thread.run_sync(eventually, "nothing is held", lambda: nothing_held(served))


async def test_a_pool_too_small_preempts_and_changes_no_answer(undisturbed: list[str]) -> None:
    sizes = ("kv.block_size=4", "kv.tokens=128", "scheduler.chunk_budget=32")
    with daemon(*sizes, gateway=True, model="default") as small:
        await anyio.to_thread.run_sync(small.wait_ready)
        assert await read_all(small) == undisturbed
        small.told("request.preempted")
        await anyio.to_thread.run_sync(eventually, "nothing is held", lambda: nothing_held(small))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"model": "SmolLM2-135M-Instruct", "messages": []}', 400, "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400, "temperature"),
        (b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', 404, "model"),
        (b'{"messages": [{"role": "user", "content": "x"}', 400, None),
        (json.dumps({"messages": [{"role": "user", "content": "word " * 9000}]}).encode(), 400, "messages"),
    ],
    ids=["empty", "nan", "infinite", "unknown model", "malformed", "over the context"],
)
def test_a_bad_request_is_told_its_field_and_disturbs_nobody(
    served: Daemon, body: bytes, status: int, param: str | None
) -> None:
    response = httpx.post(f"{address(served)}/v1/chat/completions", content=body, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert httpx.get(f"{address(served)}/health").status_code == 200


def test_the_trace_of_a_request_adds_up(served: Daemon, official: openai.OpenAI) -> None:
    answer = official.completions.create(model=MODEL, prompt="Tell me about trees " * 10, max_tokens=5, temperature=0)
    request_id = answer.id.removeprefix("cmpl-")

    def life() -> list[dict[str, Any]]:
        events = request_life(served.run_dir, request_id)
        whole = {"request.finished", "request.delivered"} <= {event["event"] for event in events}
        return events if whole else []

    events = eventually("the whole trace", life)
    at = {event["event"].removeprefix("request."): int(event["ts_ns"]) for event in reversed(events)}
    names = ["received", "tokenized", "queued", "matched", "admitted", "first_token", "finished", "delivered"]
    moments = [at[name] for name in names]
    assert moments == sorted(moments)
    found = {event["event"]: event for event in events}
    assert (
        sum(e["tokens"] for e in events if e["event"] == "request.chunk") + found["request.admitted"]["cached"]
        == (found["request.queued"]["prompt_tokens"])
    )
    finished = found["request.finished"]
    assert finished["output_tokens"] == 5
    # Within the scheduler's own clock the phases are the whole: queued until admitted, then until the last token.
    whole = at["finished"] - at["queued"]
    assert abs(finished["since_queued_ns"] - whole) < 5_000_000
    assert found["request.first_token"]["since_queued_ns"] < finished["since_queued_ns"]
    delivered = found["request.delivered"]["since_received_ns"]
    assert delivered > finished["since_queued_ns"]


def test_nobody_has_torch_and_the_default_executor_is_native(served: Daemon) -> None:
    mapped = {role: b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes() for role, pid in served.pids().items()}
    assert mapped == dict.fromkeys(mapped, False)
    assert len(mapped) == 6
    status = served.status()
    assert status is not None
    (how,) = (note for note in status.notes if note.startswith("executor: native (fast"))
    assert how.endswith("), ngram guesses")


async def test_exact_mode_recovers_too() -> None:
    with daemon(*SIZES, "executor.mode=exact", gateway=True, model="default") as exact:
        await anyio.to_thread.run_sync(exact.wait_ready)
        undisturbed = await read_all(exact)
        assert await read_all(exact, kill="executor", after=3) == undisturbed


async def test_who_comes_waits_for_no_further_round() -> None:
    """However far apart tokens are told: plans of several rounds end early, and all have their tokens."""
    sets = *SIZES, "policies.speculation=off", "scheduler.tell_every_ms=10000"
    with anyio.fail_after(120), daemon(*sets, gateway=True, model="default") as running:
        running.wait_ready()
        async with (
            httpx.AsyncClient(base_url=address(running), timeout=120) as client,
            anyio.create_task_group() as tasks,
        ):
            for tokens in (300, 2, 2, 2, 2, 2, 2):
                body = {"prompt": f"{tokens} little ducks", "max_tokens": tokens, "ignore_eos": True}
                asked = partial(client.post, "/v1/completions", json=body)
                if tokens == 300:
                    tasks.start_soon(asked)
                else:
                    await asked()
        finished = await anyio.to_thread.run_sync(running.told, "request.finished", 7)
        await anyio.to_thread.run_sync(eventually, "all is written", running.is_written)
        planned = {event["step"]: event["rounds"] for event in running.events("step.planned")}
        computed = {event["step"]: event["rounds"] for event in running.events("step.executed")}
    assert set(planned.values()) != {1}
    assert any(computed[step] != rounds for step, rounds in planned.items() if step in computed)
    assert [event["output_tokens"] for event in finished] == [2] * 6 + [300]


async def test_while_there_is_always_a_next_plan_the_executor_tells_that_it_goes_on() -> None:
    """Who is not heard to go on is killed."""
    body = {"prompt": "Many little ducks", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with anyio.fail_after(120), daemon(*SIZES, "policies.speculation=off", gateway=True, model="default") as running:
        running.wait_ready()

        def steps() -> int:
            return running.actors()["executor"].stats.get("steps", 0)

        async with (
            httpx.AsyncClient(base_url=address(running), timeout=120) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            chunks = answer.aiter_lines()
            await anext(chunks)
            before = steps()
            await anyio.to_thread.run_sync(eventually, "it goes on", lambda: steps() > before + 32)
            await anext(chunks)
            assert not running.events("request.finished")
        await anyio.to_thread.run_sync(eventually, "what was given up is gone", lambda: nothing_held(running))
        assert running.generations()["executor"] == 1
        rounds = {event["rounds"] for event in running.events("step.planned")}
        assert rounds - {1}
