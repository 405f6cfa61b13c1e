"""Every refusal has OpenAI's shape, the right status, and names the field that was wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo.core.client.stream import RequestRefused

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert all(body["error"][key] is None or isinstance(body["error"][key], str) for key in ("param", "code"))
    known: dict[str, Any] = body["error"]
    return known


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "often"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"priority": 1 << 31}, "priority"),
        ({"priority": -(1 << 31)}, "priority"),
        ({"min_tokens": 1 << 31}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_a_wrong_chat_field(http: httpx.AsyncClient, engine: Any, fields: dict[str, Any], param: str) -> None:
    known = error(await http.post(CHAT, json={"messages": USER, **fields}), 400)
    assert known["param"] == param
    assert known["type"] == "invalid_request_error"
    assert not engine.seen


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "a", "best_of": 21}, "best_of"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
async def test_a_wrong_completion_field(
    http: httpx.AsyncClient, engine: Any, fields: dict[str, Any], param: str
) -> None:
    assert error(await http.post(COMPLETION, json=fields), 400)["param"] == param
    assert not engine.seen


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_not_finite(http: httpx.AsyncClient, number: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "temperature": {number}}}'
    assert error(await http.post(CHAT, content=body), 400)["param"] == "temperature"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b"3", b"[" * 4000, b'{"messages": "\\ud800"}'])
async def test_bodies_that_are_no_json_object(http: httpx.AsyncClient, body: bytes) -> None:
    error(await http.post(CHAT, content=body), 400)


async def test_an_unknown_model(http: httpx.AsyncClient) -> None:
    for response in (
        await http.post(CHAT, json={"model": "gpt", "messages": USER}),
        await http.post(CHAT, json={"model": "", "messages": USER}),
        await http.post(COMPLETION, json={"model": "gpt", "prompt": "a"}),
        await http.get("/v1/models/gpt"),
        await http.post("/tokenize", json={"model": "gpt", "prompt": "a"}),
    ):
        known = error(response, 404)
        assert (known["param"], known["code"]) == ("model", "model_not_found")


async def test_routes_methods_types_and_sizes(http: httpx.AsyncClient) -> None:
    error(await http.get("/v1/nothing"), 404)
    response = await http.get(CHAT)
    error(response, 405)
    assert response.headers["allow"] == "POST"
    error(await http.post(CHAT, content=b"a=1", headers={"content-type": "text/plain"}), 415)
    error(await http.post(CHAT, json={"messages": USER, "user": "x" * 5000}), 413)


async def test_a_prompt_over_the_context(http: httpx.AsyncClient) -> None:
    known = error(await http.post(COMPLETION, json={"prompt": "x" * 300}), 400)
    assert (known["param"], known["code"]) == ("prompt", "context_length_exceeded")
    known = error(await http.post(COMPLETION, json={"prompt": "x" * 300, "max_tokens": 0}), 400)
    assert known["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_prompt_of_several_refuses_the_call_and_cancels_the_others(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    engine.silent = True
    body = {"prompt": ["short", "x" * 300, "also short"], "stream": stream}
    assert error(await http.post(COMPLETION, json=body), 400)["param"] == "prompt[1]"
    assert {request_id[-2:] for request_id in engine.cancelled} >= {"-0", "-2"}


async def test_a_service_that_cannot_take_requests(http: httpx.AsyncClient, engine: Any) -> None:
    engine.unavailable = "the service is draining"
    for response in (await http.post(CHAT, json={"messages": USER}), await http.get("/health")):
        known = error(response, 503)
        assert known["message"] == "the service is draining"
        assert response.headers["retry-after"]
    engine.facts = None
    error(await http.get("/v1/models"), 503)
    error(await http.post(CHAT, json={"messages": USER}), 503)


async def test_an_overloaded_engine(http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise RequestRefused("", "too many wait", "overloaded")

    monkeypatch.setattr(engine, "generate", refuse)
    response = await http.post(CHAT, json={"messages": USER})
    assert error(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_scheduler_refuses_after_it_was_accepted_has_the_status_too(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    play = engine.play

    def refuse_the_second(stream: Any, params: Any, ids: list[int]) -> None:
        if stream.request_id.endswith("-1"):
            stream.fail(RequestRefused("prompt", "never fits", "never_fits"))
        else:
            play(stream, params, ids)

    monkeypatch.setattr(engine, "play", refuse_the_second)
    known = error(await http.post(COMPLETION, json={"prompt": ["a", "b"], "stream": stream}), 400)
    assert (known["param"], known["code"]) == ("prompt[1]", "never_fits")


async def test_a_choice_that_fails_is_an_error_and_never_a_finish(http: httpx.AsyncClient, engine: Any) -> None:
    engine.error_after = 2
    known = error(await http.post(CHAT, json={"messages": USER, "n": 2}), 500)
    assert known["message"] == "the step broke"
    response = await http.post(CHAT, json={"messages": USER, "n": 2, "stream": True})
    assert response.status_code == 200
    frames = response.text.strip().split("\n\n")
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["message"] == "the step broke"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


async def test_a_fault_of_the_gateway_ends_that_request_alone(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_down(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine, "generate", break_down)
        error(await http.post(CHAT, json={"messages": USER}), 500)
    assert (await http.post(CHAT, json={"messages": USER})).status_code == 200
