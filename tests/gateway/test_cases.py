"""Faults that users of other engines met, by their names in the list of cases; others have files of their own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway.test_errors import error
from tests.gateway.test_generate import USER, events, post

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


async def test_h05_h06_usage_comes_last_and_after_the_finish(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True}
    *chunks, last = events(await post(http, "chat/completions", messages=USER, stream=True, stream_options=options))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 9)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 3])
async def test_h07_h08_every_choice_has_its_index_and_one_finish(http: httpx.AsyncClient, n: int) -> None:
    chunks = events(await post(http, "chat/completions", messages=USER, stream=True, n=n))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all("finish_reason" in choice for choice in choices)
    assert {choice["index"] for choice in choices} == set(range(n))
    for index in range(n):
        finishes = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert finishes[:-1] == [None] * (len(finishes) - 1)
        assert finishes[-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_h13_one_prompt_that_is_too_long_refuses_the_call(http: httpx.AsyncClient, stream: bool) -> None:
    response = await post(http, "completions", prompt=["short", "x" * 300, "also short"], stream=stream)
    known = error(response, 400)
    assert (known["param"], known["code"]) == ("prompt[1]", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_h14_eight_prompts_keep_their_order(http: httpx.AsyncClient, engine: Any, stream: bool) -> None:
    prompts = ["x" * (i * 5 % 8 + 1) + str(i) for i in range(8)]
    response = await post(http, "completions", prompt=prompts, n=2, echo=True, max_tokens=1, stream=stream)
    texts = [""] * 16
    for body in events(response) if stream else [response.json()]:
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [prompt + engine.answer[0] for prompt in prompts for _ in range(2)]


@pytest.mark.parametrize(("prompt", "status"), [([0], 200), ([0, 0], 200), ([[0]], 200), ([], 400), ([[]], 400)])
async def test_h15_token_zero_is_a_token(http: httpx.AsyncClient, prompt: Any, status: int) -> None:
    assert (await http.post(COMPLETION, json={"prompt": prompt})).status_code == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [97, 98], [[97], [98]]])
async def test_h16_all_four_forms_of_a_prompt(http: httpx.AsyncClient, prompt: Any, stream: bool) -> None:
    assert (await http.post(COMPLETION, json={"prompt": prompt, "stream": stream})).status_code == 200


async def test_h17_unknown_fields_are_told_and_known_ones_checked(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi", "mood": "good"}]
    response = await http.post(CHAT, json={"messages": messages, "foo": 1, "temprature": 0})
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "foo, temprature, messages[0].mood"
    assert error(await http.post(CHAT, json={"messages": USER, "temperature": "0"}), 400)["param"] == "temperature"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_completion_tokens": 10**12}, 2**31 - 1),
        ({"max_tokens": 0}, 400),
        ({"max_completion_tokens": -1}, 400),
    ],
)
async def test_h18_the_newer_limit_holds(
    http: httpx.AsyncClient, engine: Any, fields: dict[str, Any], limit: int | None
) -> None:
    response = await http.post(CHAT, json={"messages": USER, **fields})
    if limit == 400:
        assert error(response, 400)["param"] in fields
    else:
        ((_, _, params),) = engine.seen
        assert params.max_tokens == limit


async def test_h19_h44_a_prompt_that_is_too_long_is_never_cut(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "The code word is heron. " + "x" * 300}]
    assert error(await http.post(CHAT, json={"messages": messages}), 400)["code"] == "context_length_exceeded"
    assert (await http.post(CHAT, json={"messages": USER})).status_code == 200


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
async def test_h23_parts_are_text_in_every_role(http: httpx.AsyncClient, engine: Any, role: str) -> None:
    message = {"role": role, "content": [{"type": "text", "text": "heron"}]}
    assert (await http.post(CHAT, json={"messages": [message]})).status_code == 200
    ((_, prompt, _),) = engine.seen
    assert prompt.messages[0]["content"] == "heron"
    for content, param in (([], "messages[0].content"), ([{"type": "image_url"}], "messages[0].content[0].type")):
        response = await http.post(CHAT, json={"messages": [{"role": role, "content": content}]})
        assert error(response, 400)["param"] == param


async def test_h37_what_is_limited_says_its_limit(http: httpx.AsyncClient) -> None:
    assert (await post(http, "completions", prompt="a", best_of=5, logprobs=1)).status_code == 200
    assert "20" in error(await post(http, "completions", prompt="a", best_of=25), 400)["message"]
    for fields in ({"n": 17}, {"beam_width": 17}, {"best_of": 17}):
        refused = error(await post(http, "completions", prompt="a", use_beam_search=True, **fields), 400)
        assert (refused["param"], "16" in refused["message"]) == (next(iter(fields)), True)
