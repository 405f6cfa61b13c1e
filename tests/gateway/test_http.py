"""The gateway behind a real socket: what the official client sees, and what happens when a client goes."""

from __future__ import annotations

import re
import socket
from typing import Any

import anyio
import httpx
import openai
import pytest

from octavo.core.client.stream import ServiceUnavailable
from octavo.core.config.schema import Config, ServerConfig
from octavo.core.messages import Row
from octavo.plugins.openai import answer
from octavo.plugins.openai.app import CANNOT_BIND, run

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


async def until(condition: Any) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.sleep(0.005)


@pytest.fixture
def official(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_the_official_client(official: Any, engine: Any) -> None:
    assert [model.id for model in official.models.list()] == ["m"]
    assert official.models.retrieve("m").id == "m"
    chat = official.chat.completions.create(model="m", messages=BODY["messages"])
    assert chat.choices[0].message.content == engine.answer
    options = {"include_usage": True}
    chunks = list(
        official.chat.completions.create(model="m", messages=BODY["messages"], stream=True, stream_options=options)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == engine.answer
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    completion = official.completions.create(model="m", prompt=[104, 105], logprobs=1)
    assert completion.choices[0].text == engine.answer
    with pytest.raises(openai.BadRequestError) as raised:
        official.completions.create(model="m", prompt="x" * 300)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        official.models.retrieve("other")


def test_the_official_clients_stream_helper(official: Any, engine: Any) -> None:
    with official.chat.completions.stream(model="m", messages=BODY["messages"]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == engine.answer


def test_the_official_client_raises_an_error_that_comes_within_a_stream(official: Any, engine: Any) -> None:
    engine.error_after = 3
    stream = official.chat.completions.create(model="m", messages=BODY["messages"], stream=True)
    got: list[str] = []
    with pytest.raises(openai.APIError, match="the step broke"):
        got.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(got) == engine.answer[:3]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(url: str, engine: Any, stream: bool) -> None:
    engine.silent = True
    async with httpx.AsyncClient(base_url=url) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.post(CHAT, json={**BODY, "n": 2, "stream": stream}))
        await until(lambda: engine.seen)
        tasks.cancel_scope.cancel()
    await engine.until(engine.only_request())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_daemon_ends_under_a_request(url: str, engine: Any, stream: bool, begun: bool) -> None:
    """Only where output has been streamed already is the status out."""
    engine.silent = True
    body = {**BODY, "stream": stream}

    async def end() -> None:
        await until(lambda: engine.seen)
        request_id = engine.only_request()
        if begun:
            engine.streams[request_id].feed(Row(request_id, 0, 0, 0, [104], "h"))
        if not (stream and begun):
            engine.fail(ServiceUnavailable("stopped"))

    async with httpx.AsyncClient(base_url=url, timeout=10) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(end)
        async with client.stream("POST", CHAT, json=body) as response:
            if stream and begun:
                engine.fail(ServiceUnavailable("stopped"))
            text = (await response.aread()).decode()
    assert response.status_code == (200 if stream and begun else 503)
    assert "stopped" in text
    assert "[DONE]" not in text


async def test_a_silent_stream_is_kept_alive(url: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "KEEP_ALIVE_S", 0.01)
    engine.silent = True
    async with (
        httpx.AsyncClient(base_url=url, timeout=10) as client,
        client.stream("POST", CHAT, json={**BODY, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        with anyio.fail_after(5):
            while not (await anext(lines)).startswith(":"):
                pass


async def test_many_streams_at_once_do_not_disturb_each_other(url: str, engine: Any) -> None:
    texts: dict[int, str] = {}

    async def ask(i: int) -> None:
        body = {**BODY, "max_tokens": i % 7 + 1, "stream": True}
        response = await client.post(CHAT, json=body if i % 5 else {**BODY, "n": 0})
        texts[i] = response.text

    async with httpx.AsyncClient(base_url=url, timeout=30) as client, anyio.create_task_group() as tasks:
        for i in range(40):
            tasks.start_soon(ask, i)
    assert all(("[DONE]" in text) == (i % 5 != 0) for i, text in texts.items())
    assert len(texts) == 40


def test_a_taken_port_ends_the_process_at_once(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as raised:
            run(Config(server=ServerConfig(port=port)), tmp_path, 1)
    assert raised.value.code == CANNOT_BIND
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


async def test_the_other_routes(url: str, engine: Any) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("m", 200)
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/version")).json()["version"]
        tokens = (await client.post("/tokenize", json={"prompt": "hé"})).json()
        assert (tokens["count"], tokens["max_model_len"]) == (3, 200)
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text == {"prompt": "hé"}
        assert (await client.post("/tokenize", json={"messages": BODY["messages"]})).json()["count"] == 2
        for bad in ({}, {"prompt": "a", "messages": BODY["messages"]}):
            assert (await client.post("/tokenize", json=bad)).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [999]})).json()["error"]["param"] == "tokens"


async def test_the_page_is_whole_by_itself(http: httpx.AsyncClient) -> None:
    response = await http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", response.text)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "innerHTML" not in response.text, "what a model writes is text"


async def test_the_load_is_the_answers_that_are_being_given(http: httpx.AsyncClient, engine: Any) -> None:
    engine.silent = True
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(lambda: http.post("/v1/completions", json={"prompt": "a"}))
        with anyio.fail_after(10):
            while (await http.get("/load")).json() != {"server_load": 3}:
                await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()
    assert (await http.get("/load")).json() == {"server_load": 0}
