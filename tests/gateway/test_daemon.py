"""HTTP over real processes: streams, deaths under them, and the daemon's own end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import openai
import pytest

from tests.processes.daemon import Daemon, daemon, eventually

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "tell me"}],
    "temperature": 0,
    "max_tokens": 400,
    "stream": True,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    with daemon(gateway=True) as running:
        running.wait_ready()
        yield running


def address(running: Daemon) -> str:
    found = running.info().address
    assert found is not None
    return found


def is_idle(running: Daemon) -> bool:
    stats = running.actors()["scheduler"].stats
    return stats.get("running") == stats.get("waiting") == 0


async def until(running: Daemon, what: str, probe: Any) -> None:
    await anyio.to_thread.run_sync(eventually, what, lambda: probe(running))


async def read(client: httpx.AsyncClient, begun: anyio.Event, body: dict[str, Any]) -> tuple[str, bool]:
    """A stream's text, and whether it ended as it should; `begun` is set once a good part has come."""
    text, lines, done = "", 0, False
    async with client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            done = line == "data: [DONE]"
            if line.startswith("data: {"):
                lines += 1
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content", "")
            if lines >= 50:
                begun.set()
            if done:
                break
    return text, done


def test_the_official_client(served: Daemon) -> None:
    with openai.OpenAI(base_url=f"{address(served)}/v1", api_key="none", max_retries=0, timeout=30) as client:
        assert [model.id for model in client.models.list()] == ["ghost"]
        chat = client.chat.completions.create(model="ghost", messages=LONG["messages"], n=3, seed=1, max_tokens=9)
        assert [choice.finish_reason for choice in chat.choices] == ["length"] * 3
        assert len({choice.message.content for choice in chat.choices}) == 3
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 27
        one = client.completions.create(model="ghost", prompt=[104, 105], max_tokens=9, temperature=0, logprobs=2)
        assert one.choices[0].logprobs is not None
        assert len(one.choices[0].logprobs.tokens or []) == 9
        stop = one.choices[0].text[4:6]
        cut = client.completions.create(model="ghost", prompt=[104, 105], max_tokens=9, temperature=0, stop=stop)
        assert cut.choices[0].finish_reason == "stop"
        assert cut.choices[0].text == one.choices[0].text[: one.choices[0].text.index(stop)]
        again = client.chat.completions.create(model="ghost", messages=LONG["messages"], max_tokens=1)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens
        with pytest.raises(openai.BadRequestError, match="8192") as refused:
            client.completions.create(model="ghost", prompt="x" * 9000)
        assert refused.value.code == "context_length_exceeded"


def test_echo_scores_the_whole_prompt_cached_or_not(served: Daemon) -> None:
    """Several chunks long; the second time all of it is in the prefix tree, and the scores are the same."""
    prompt = [97 + i * i % 26 for i in range(300)]
    with openai.OpenAI(base_url=f"{address(served)}/v1", api_key="none", max_retries=0, timeout=30) as client:

        def scores(**fields: Any) -> list[Any]:
            answer = client.completions.create(model="ghost", prompt=prompt, temperature=0, max_tokens=2, **fields)
            assert all(choice.text.startswith(bytes(prompt).decode()) for choice in answer.choices)
            assert [choice.logprobs for choice in answer.choices] == [answer.choices[0].logprobs] * len(answer.choices)
            return [] if answer.choices[0].logprobs is None else answer.choices[0].logprobs.token_logprobs or []

        cold = scores(echo=True, logprobs=1)
        assert len(cold) == 302
        assert cold[0] is None
        assert len(set(cold[1:300])) > 100, "the ghost's scores differ from token to token"
        assert scores(echo=True, logprobs=1, n=3) == cold
        assert scores(echo=True) == []
        with pytest.raises(openai.BadRequestError, match="grammar") as refused:
            client.completions.create(model="ghost", prompt="x", extra_body={"guided_regex": "a"})
        assert refused.value.code == "unsupported_parameter"


def test_what_the_tokenizer_is(served: Daemon) -> None:
    """As lm-eval's remote tokenizer asks it."""
    told = httpx.get(f"{address(served)}/tokenizer_info", timeout=30).json()
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert told["eos_token"] == "<|end|>"
    assert "messages" in told["chat_template"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_leaves_nothing_running(served: Daemon, stream: bool) -> None:
    body = {**LONG, "max_tokens": 3900, "n": 2, "stream": stream}
    async with httpx.AsyncClient(base_url=address(served), timeout=30) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.post(CHAT, json=body))
        await until(served, "it runs", lambda running: not is_idle(running))
        tasks.cancel_scope.cancel()
    await until(served, "nothing runs", is_idle)
    served.told("request.cancelled")


@pytest.mark.parametrize("role", ["tokenizer", "scheduler"])
async def test_a_stream_pauses_when_an_actor_dies_and_then_goes_on(served: Daemon, role: str) -> None:
    pid = served.pids()[role]
    async with httpx.AsyncClient(base_url=address(served), timeout=60) as client:
        expected = await read(client, anyio.Event(), LONG)
        got: list[tuple[str, bool]] = []
        begun = anyio.Event()

        async def again() -> None:
            got.append(await read(client, begun, LONG))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again)
            await begun.wait()
            assert not got
            os.kill(pid, signal.SIGKILL)
        assert got == [expected]
        assert expected[1]
    await anyio.to_thread.run_sync(served.wait_replaced, role, pid)


async def test_a_gateways_death_cancels_its_requests_and_the_next_one_listens_at_the_same_place(
    served: Daemon,
) -> None:
    before = address(served)
    pid = served.pids()["gateway"]
    begun = anyio.Event()
    broken: list[httpx.HTTPError] = []

    async def stream(client: httpx.AsyncClient) -> None:
        try:
            await read(client, begun, {**LONG, "max_tokens": 3000})
        except httpx.HTTPError as error:
            broken.append(error)

    async with httpx.AsyncClient(base_url=before, timeout=60) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(stream, client)
        await begun.wait()
        os.kill(pid, signal.SIGKILL)
    assert broken
    await anyio.to_thread.run_sync(served.wait_replaced, "gateway", pid)
    await until(served, "nothing runs", is_idle)
    assert address(served) == before
    async with httpx.AsyncClient(base_url=before, timeout=60) as client:
        assert (await client.get("/health")).status_code == 200


async def test_a_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    with daemon(gateway=True) as short:
        await anyio.to_thread.run_sync(short.wait_ready)
        got: list[tuple[str, bool]] = []
        begun = anyio.Event()
        async with httpx.AsyncClient(base_url=address(short), timeout=60) as client:

            async def stream() -> None:
                got.append(await read(client, begun, {**LONG, "max_tokens": 800}))

            async def refused() -> None:
                while (response := await client.post(CHAT, json={**LONG, "max_tokens": 1})).status_code != 503:
                    await anyio.sleep(0.01)
                assert response.headers["retry-after"]
                assert (await client.get("/health")).status_code == 503

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream)
                await begun.wait()
                short.process.send_signal(signal.SIGTERM)
                with anyio.fail_after(30):
                    await refused()
        ((text, done),) = got
        assert (len(text), done) == (800, True)
        assert await anyio.to_thread.run_sync(short.wait_end) == 0
