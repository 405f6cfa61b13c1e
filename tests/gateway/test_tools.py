"""Tools over HTTP: what is offered reaches the template, what the model writes becomes calls, whole and streamed."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import msgspec
import openai
import pytest

from octavo.core.config.schema import Config, ServerConfig
from octavo.core.messages import Chat, Grammar
from octavo.core.tokenizer.ghost import EOS_ID
from octavo.plugins.openai.app import build_app
from tests import grammars
from tests.gateway.test_generate import USER, events, post

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": 'Zürich {"', "days": [1, 2]}
CALL = f"<tool_call>\n{json.dumps({'name': 'look_up', 'arguments': ARGUMENTS})}\n</tool_call>"


def message(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["choices"][0]["message"]
    return found


def joined(chunks: list[Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Content, calls and finishes of a stream of one choice."""
    content, calls, finishes = "", list[dict[str, Any]](), list[str]()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content", "")
        for piece in choice["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["function"]["arguments"] == ""
                calls.append({**piece, "function": dict(piece["function"])})
            else:
                assert piece.keys() == {"index", "function"}, "id, type and name come once"
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"] is not None:
            finishes.append(choice["finish_reason"])
    return content, calls, finishes


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_the_same_whole_and_streamed(http: httpx.AsyncClient, engine: Any, stream: bool) -> None:
    engine.answer = f"I see. {CALL}{CALL}"
    response = await post(http, "chat/completions", messages=USER, tools=[TOOL], stream=stream)
    if stream:
        content, calls, finishes = joined(events(response))
    else:
        content, calls = message(response.json())["content"], message(response.json())["tool_calls"]
        finishes = [response.json()["choices"][0]["finish_reason"]]
    assert content == "I see. "
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [ARGUMENTS, ARGUMENTS]
    assert [call["function"]["name"] for call in calls] == ["look_up"] * 2
    assert len({call["id"] for call in calls}) == 2
    assert finishes == ["tool_calls"]
    ((_, prompt, _),) = engine.seen
    assert isinstance(prompt, Chat)
    assert prompt.tools == [TOOL]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "calls", "finish"),
    [
        ({"tools": [TOOL]}, 1, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": "auto"}, 1, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": "none"}, 0, "stop"),
        ({"tools": []}, 0, "stop"),
        ({}, 0, "stop"),
        ({"tools": [{"type": "function", "function": {"name": "other"}}]}, 0, "stop"),
    ],
)
async def test_h24_auto_and_none(
    http: httpx.AsyncClient, engine: Any, fields: dict[str, Any], calls: int, finish: str, stream: bool
) -> None:
    engine.answer = CALL
    response = await post(http, "chat/completions", messages=USER, stream=stream, **fields)
    if stream:
        content, found, finishes = joined(events(response))
    else:
        body = response.json()
        content, found = message(body)["content"] or "", message(body).get("tool_calls", [])
        finishes = [body["choices"][0]["finish_reason"]]
    assert (len(found), finishes) == (calls, [finish])
    assert content == ("" if calls else CALL)


NAMED = {"type": "function", "function": {"name": "look_up"}}
REQUIRED_CALLS = json.dumps([{"name": "look_up", "arguments": ARGUMENTS}] * 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "answer", "calls", "finish", "schema"),
    [
        ("required", REQUIRED_CALLS, 2, "tool_calls", "array"),
        (NAMED, json.dumps(ARGUMENTS), 1, "stop", "object"),
    ],
)
async def test_h24_required_and_named(
    http: httpx.AsyncClient, engine: Any, stream: bool, choice: Any, answer: str, calls: int, finish: str, schema: str
) -> None:
    """The engine is held to a schema, and its whole answer is calls."""
    engine.answer = answer
    response = await post(http, "chat/completions", messages=USER, tools=[TOOL], tool_choice=choice, stream=stream)
    if stream:
        content, found, finishes = joined(events(response))
    else:
        body = response.json()
        content, found = message(body)["content"] or "", message(body)["tool_calls"]
        finishes = [body["choices"][0]["finish_reason"]]
    assert (content, len(found), finishes) == ("", calls, [finish])
    assert [json.loads(call["function"]["arguments"]) for call in found] == [ARGUMENTS] * calls
    ((_, _, params),) = engine.seen
    assert json.loads(params.sampling.grammar.text)["type"] == schema


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
async def test_h27_a_forced_call_that_is_cut_says_length(
    http: httpx.AsyncClient, engine: Any, choice: Any, stream: bool
) -> None:
    engine.answer = REQUIRED_CALLS if choice == "required" else json.dumps(ARGUMENTS)
    body = {"messages": USER, "tools": [TOOL], "tool_choice": choice, "max_tokens": 5, "stream": stream}
    response = await post(http, "chat/completions", **body)
    if stream:
        _, calls, finishes = joined(events(response))
    else:
        calls = message(response.json()).get("tool_calls", [])
        finishes = [response.json()["choices"][0]["finish_reason"]]
    assert (calls, finishes) == ([], ["length"])


@pytest.mark.parametrize("stream", [False, True])
async def test_h27_a_call_that_is_cut_is_no_call(http: httpx.AsyncClient, engine: Any, stream: bool) -> None:
    engine.answer = CALL + "x" * 20
    response = await post(http, "chat/completions", messages=USER, tools=[TOOL], max_tokens=40, stream=stream)
    if stream:
        content, calls, finishes = joined(events(response))
    else:
        content, calls = message(response.json())["content"], message(response.json()).get("tool_calls", [])
        finishes = [response.json()["choices"][0]["finish_reason"]]
    assert (content, calls, finishes) == (CALL[:40], [], ["length"])


async def test_a_cut_after_a_call_is_still_a_cut(http: httpx.AsyncClient, engine: Any) -> None:
    engine.answer = CALL + "x" * 20
    body = (await post(http, "chat/completions", messages=USER, tools=[TOOL], max_tokens=len(CALL) + 5)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(message(body)["tool_calls"]) == 1


async def test_h09_fifty_streams_with_a_tool_each_end_once(http: httpx.AsyncClient, engine: Any) -> None:
    for i in range(50):
        engine.answer = (CALL + "text " + CALL)[: i * 4 + 1]
        response = await post(http, "chat/completions", messages=USER, tools=[TOOL], stream=True)
        _, calls, finishes = joined(events(response))
        assert finishes == ["tool_calls" if calls else "stop"]


async def test_one_call_where_only_one_is_wanted(http: httpx.AsyncClient, engine: Any) -> None:
    engine.answer = CALL + CALL
    body = {"messages": USER, "tools": [TOOL], "parallel_tool_calls": False}
    assert len(message((await post(http, "chat/completions", **body)).json())["tool_calls"]) == 1
    _, calls, _ = joined(events(await post(http, "chat/completions", **body, stream=True)))
    assert len(calls) == 1


async def test_logprobs_of_text_that_is_held_back_are_not_lost(http: httpx.AsyncClient, engine: Any) -> None:
    engine.answer = CALL
    body = {"messages": USER, "tools": [TOOL], "logprobs": True, "stream": True}
    chunks = events(await post(http, "chat/completions", **body))
    entries = [e for c in chunks for e in ((c["choices"][0]["logprobs"] or {}).get("content", []))]
    assert "".join(entry["token"] for entry in entries) == CALL


async def test_h22_a_history_with_calls_and_no_content(http: httpx.AsyncClient, engine: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Bern"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert (await post(http, "chat/completions", messages=messages, tools=[TOOL])).status_code == 200
    ((_, prompt, _),) = engine.seen
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert prompt.messages[2]["tool_call_id"] == "c1"


PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"items": {"type": "integer"}}}}
STRICT = {
    "type": "function",
    "function": {"name": "look_up", "strict": True, "parameters": {**PLACE, "required": ["city"]}},
}


async def test_strict_is_named_as_ignored_where_no_grammar_is_served(http: httpx.AsyncClient, engine: Any) -> None:
    response = await post(http, "chat/completions", messages=USER, tools=[STRICT])
    assert response.headers["x-octavo-ignored-fields"] == "tools[0].function.strict"
    assert engine.seen[-1][2].sampling.grammar is None


@pytest.mark.parametrize("name", grammars.NAMES)
async def test_strict_functions_hold_calls_to_their_schema_and_leave_text_free(
    http: httpx.AsyncClient, engine: Any, name: str
) -> None:
    engine.facts = msgspec.structs.replace(engine.facts, serves=("grammar",))
    engine.answer = f"I see. {CALL}"
    free = {"type": "function", "function": {"name": 'o"ther', "parameters": {"type": "array"}}}
    response = await post(http, "chat/completions", messages=USER, tools=[STRICT, free])
    assert "x-octavo-ignored-fields" not in response.headers
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = engine.seen[-1][2].sampling.grammar
    grammars.engine(name).check(grammar)
    walk = partial(accepts, name, grammar)
    spelled = json.dumps({"name": "look_up", "arguments": {"city": 'Rome {"', "days": [1, 2]}})
    assert walk(f"I see. <tool_call>\n{spelled}\n</tool_call>")
    assert walk("just text, a < b, <tool> and </tool_call>")
    assert walk("<tool_call>" + json.dumps({"name": 'o"ther', "arguments": {"any": [1]}}) + "</tool_call> and so on")
    assert not walk('<tool_call>{"name": "look_up", "arguments": {}}</tool_call>')
    assert not walk('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>')
    assert not walk("<tool_call> I do not know")
    assert not walk(f"<tool_call>{spelled}")


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"response_format": {"type": "json_object"}}])
async def test_strict_asks_for_nothing_where_no_call_is_possible(
    http: httpx.AsyncClient, engine: Any, fields: dict[str, Any]
) -> None:
    engine.facts = msgspec.structs.replace(engine.facts, serves=("grammar",))
    await post(http, "chat/completions", messages=USER, tools=[STRICT], **fields)
    grammar = engine.seen[-1][2].sampling.grammar
    assert grammar is None or grammar.kind == "schema"


def accepts(name: str, grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole answer in it for that engine, spelled a byte a token."""
    walk = grammars.engine(name).load("ghost", 259).start(grammar)
    for token in text.encode():
        if not walk.mask()[token]:
            return False
        walk.take([token])
    return bool(walk.mask()[EOS_ID])


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart(engine: Any, config: Config, stream: bool) -> None:
    engine.answer = f"<think>hm</think>\n\nso {CALL}"
    server = msgspec.structs.replace(config.server, reasoning_parser="think")
    transport = httpx.ASGITransport(build_app(engine, Config(server=server)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        response = await post(http, "chat/completions", messages=USER, tools=[TOOL], stream=stream)
    if stream:
        chunks = events(response)
        reasoning = "".join(c["choices"][0]["delta"].get("reasoning_content", "") for c in chunks)
        content, calls, _ = joined(chunks)
    else:
        reasoning, content = message(response.json())["reasoning_content"], message(response.json())["content"]
        calls = message(response.json())["tool_calls"]
    assert (reasoning, content, len(calls)) == ("hm", "so ", 1)


def test_the_official_client_reads_the_calls(url: str, engine: Any) -> None:
    engine.answer = f"I see. {CALL}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        tools: Any = [TOOL]
        messages: Any = USER
        whole = client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert whole.choices[0].message.tool_calls
        with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
            final = stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    (call,) = calls
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert final.choices[0].finish_reason == "tool_calls"


def test_an_unknown_parser_is_said(engine: Any) -> None:
    with pytest.raises(Exception, match="hermes"):
        build_app(engine, Config(server=ServerConfig(tool_parser="klingon")))
