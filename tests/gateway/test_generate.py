"""What a generated answer looks like, whole and streamed."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import msgspec
import pytest

from octavo.core.messages import Chat, Ids, Text

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[Any]:
    """The objects of an event stream; checks the framing and that it ended in order."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame[len("data: ") :]) for frame in frames]


async def post(http: httpx.AsyncClient, route: str, **body: Any) -> httpx.Response:
    return await http.post(f"/v1/{route}", json=body)


async def test_a_whole_chat(http: httpx.AsyncClient, engine: Any) -> None:
    response = await post(http, "chat/completions", model="m", messages=USER)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"] == f"chatcmpl-{engine.only_request()}"
    assert body["model"] == "m"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == engine.answer
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }


async def test_a_streamed_chat_of_three_choices(http: httpx.AsyncClient, engine: Any) -> None:
    options = {"include_usage": True}
    response = await post(http, "chat/completions", messages=USER, n=3, stream=True, stream_options=options)
    *chunks, last = events(response)
    assert len({(c["id"], c["created"], c["object"]) for c in (*chunks, last)}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3 * len(engine.answer)
    assert last["usage"]["prompt_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all({"index", "delta", "finish_reason"} <= choice.keys() for choice in choices)
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == engine.answer
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"] is not None] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


async def test_without_include_usage_no_chunk_has_usage(http: httpx.AsyncClient) -> None:
    response = await post(http, "chat/completions", messages=USER, stream=True)
    assert all("usage" not in chunk for chunk in events(response))


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_choices_are_numbered_by_prompt_then_choice(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    response = await post(http, "completions", prompt=["a", "bb", "ccc"], n=2, max_tokens=3, stream=stream)
    objects = events(response) if stream else [response.json()]
    texts = [""] * 6
    finishes: dict[int, str] = {}
    for body in objects:
        assert body["object"] == "text_completion"
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                finishes[choice["index"]] = choice["finish_reason"]
    assert texts == [engine.answer[:3]] * 6
    assert finishes == dict.fromkeys(range(6), "length")
    base = engine.seen[0][0].removesuffix("-0")
    assert [(request_id, prompt) for request_id, prompt, _ in engine.seen] == [
        (f"{base}-{i}", Text(text)) for i, text in enumerate(["a", "bb", "ccc"])
    ]
    if not stream:
        assert objects[0]["usage"]["prompt_tokens"] == 6
        assert objects[0]["usage"]["completion_tokens"] == 18
        assert objects[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 12


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("a", [Text("a")]),
        (["a"], [Text("a")]),
        ([0], [Ids([0])]),
        ([0, 0], [Ids([0, 0])]),
        ([[0], [5, 6]], [Ids([0]), Ids([5, 6])]),
    ],
)
async def test_all_forms_of_a_prompt(http: httpx.AsyncClient, engine: Any, prompt: Any, asked: Any) -> None:
    response = await post(http, "completions", prompt=prompt)
    assert response.status_code == 200
    assert [one for _, one, _ in engine.seen] == asked


async def test_content_is_text_in_every_form_for_every_role(http: httpx.AsyncClient, engine: Any) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": role, "content": parts} for role in ("system", "developer", "user", "assistant", "tool")
    ]
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    response = await post(http, "chat/completions", messages=messages)
    assert response.status_code == 200
    ((_, prompt, _),) = engine.seen
    assert isinstance(prompt, Chat)
    assert [turn["content"] for turn in prompt.messages] == ["xy"] * 5 + [""]
    assert [turn["role"] for turn in prompt.messages[:2]] == ["system", "system"]
    (told,) = prompt.messages[5]["tool_calls"]
    assert told == {**call, "function": {"name": "f", "arguments": {}}}, "templates take arguments as an object"


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(http: httpx.AsyncClient, engine: Any, stream: bool) -> None:
    response = await post(http, "chat/completions", messages=USER, logprobs=True, top_logprobs=1, stream=stream)
    choices = [c for body in (events(response) if stream else [response.json()]) for c in body["choices"]]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == engine.answer
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)
    ((_, _, params),) = engine.seen
    assert params.sampling.logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_lie_where_their_tokens_are(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    response = await post(http, "completions", prompt="a", logprobs=0, stream=stream)
    found = [c["logprobs"] for body in (events(response) if stream else [response.json()]) for c in body["choices"]]
    tokens = [token for one in found for token in one["tokens"]]
    offsets = [offset for one in found for offset in one["text_offset"]]
    assert "".join(tokens) == engine.answer
    assert [engine.answer[offset : offset + 1] for offset in offsets] == tokens
    assert all(len(one["tokens"]) == len(one["token_logprobs"]) == len(one["top_logprobs"]) for one in found)


async def test_parameters_reach_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    response = await post(
        http,
        "chat/completions",
        messages=USER,
        stop=["a", "b"],
        seed=-1,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        typical_p=0.3,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=1,
        ignore_eos=True,
        stop_token_ids=[3],
        max_tokens=5,
        max_completion_tokens=4,
        skip_special_tokens=False,
    )
    assert response.status_code == 200
    ((_, _, params),) = engine.seen
    sampling = params.sampling
    assert (params.stop, params.stop_ids, params.ignore_eos, params.max_tokens) == (("a", "b"), (3,), True, 4)
    assert not params.skip_special_tokens
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.typical_p) == (0.1, 0.3)
    assert (sampling.repetition, sampling.presence, sampling.frequency) == (1.1, -1.0, 1.0)
    assert sampling.seed == 2**63 - 1


async def test_defaults_are_those_of_the_api(http: httpx.AsyncClient, engine: Any) -> None:
    await post(http, "chat/completions", messages=USER, top_p=0, stop=None, n=None, tools=[], logit_bias={})
    await post(http, "completions", prompt="a")
    (_, _, chat), (_, _, completion) = engine.seen
    assert (chat.n, chat.max_tokens, chat.sampling.temperature, chat.sampling.seed) == (1, None, 1.0, -1)
    assert (chat.sampling.top_k, chat.sampling.top_p) == (1, 1.0)
    assert completion.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_asked_is_an_answer_without_the_engine(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    response = await post(http, "completions", prompt="abc", max_tokens=0, stream=stream)
    body = events(response)[-1] if stream else response.json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")
    assert not engine.seen


async def test_unknown_fields_are_ignored_and_named(http: httpx.AsyncClient) -> None:
    response = await post(
        http,
        "chat/completions",
        messages=[{"role": "user", "content": "hi", "zap": 1}],
        temprature=0,
        stream=True,
        stream_options={"continuous_use": True},
        **{"bad\nname ü": 1},
    )
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"].split(", ") == [
        "temprature",
        "bad\\nname \\xfc",
        "stream_options.continuous_use",
        "messages[0].zap",
    ]


async def test_a_requests_times_count_from_when_its_call_came(http: httpx.AsyncClient, engine: Any) -> None:
    before_ns = time.monotonic_ns()
    await http.post("/v1/chat/completions", json={"messages": USER})
    (received_ns,) = engine.received
    assert before_ns <= received_ns <= time.monotonic_ns()


async def test_the_clients_own_request_id_is_echoed_and_traced(http: httpx.AsyncClient, engine: Any) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": USER}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert engine.trace_ids == ["mine"]
    response = await http.get("/v1/models")
    assert response.headers["x-request-id"]


async def test_the_fingerprint_is_of_what_runs(http: httpx.AsyncClient, engine: Any) -> None:
    """The same in every answer and chunk; another one where the weights or what computes them differ."""
    whole = [(await post(http, "chat/completions", messages=USER)).json()["system_fingerprint"] for _ in range(2)]
    chunks = events(await post(http, "chat/completions", messages=USER, stream=True))
    assert {*whole, *(chunk["system_fingerprint"] for chunk in chunks)} == {whole[0]}
    engine.facts = msgspec.structs.replace(engine.facts, cache_seed=b"another")
    assert (await post(http, "completions", prompt="hi")).json()["system_fingerprint"] != whole[0]
