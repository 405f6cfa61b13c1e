"""`/v1/responses`: the official client reads it, whole and streamed, and both say the same."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from octavo.core.messages import Chat
from tests.gateway.test_errors import error
from tests.gateway.test_tools import ARGUMENTS, CALL

pytestmark = pytest.mark.anyio

ROUTE = "/v1/responses"
TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}


async def stream(http: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await http.post(ROUTE, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = []
    for frame in response.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(response).replace(response["id"][-24:], "")
    return {**json.loads(text), "created_at": 0}


@pytest.mark.parametrize("answer", ["héllo 👍", f"I see. {CALL}{CALL}", CALL, "x" * 30])
async def test_whole_and_streamed_are_the_same_response(http: httpx.AsyncClient, engine: Any, answer: str) -> None:
    engine.answer = answer
    body = {"input": "hi", "tools": [TOOL], "max_output_tokens": None if answer[0] != "x" else 8}
    whole = (await http.post(ROUTE, json=body)).json()
    events = await stream(http, **body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    assert whole["status"] == ("incomplete" if answer[0] == "x" else "completed")


async def test_h45_usage_has_both_sides(http: httpx.AsyncClient, engine: Any) -> None:
    usage = (await http.post(ROUTE, json={"input": "hi"})).json()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (2, 7, 9)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert (await stream(http, input="hi"))[-1]["response"]["usage"] == usage


async def test_items_become_messages(http: httpx.AsyncClient, engine: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "look_up", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
    ]
    response = await http.post(ROUTE, json={"input": items, "instructions": "Be kind.", "tools": [TOOL]})
    assert response.status_code == 200, response.text
    ((_, prompt, _),) = engine.seen
    assert isinstance(prompt, Chat)
    assert [turn["role"] for turn in prompt.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [call["function"]["arguments"] for call in prompt.messages[2]["tool_calls"]] == [{}, {"a": 1}]
    assert response.json()["instructions"] == "Be kind."
    assert response.json()["store"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "response_format.type"),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, engine: Any, fields: dict[str, Any], param: str) -> None:
    assert error(await http.post(ROUTE, json=fields), 400)["param"] == param
    assert not engine.seen


async def test_an_error_within_a_stream_is_an_event(http: httpx.AsyncClient, engine: Any) -> None:
    engine.error_after = 3
    last = (await stream(http, input="hi"))[-1]
    assert (last["type"], last["message"]) == ("error", "the step broke")


def test_the_official_client(url: str, engine: Any) -> None:
    engine.answer = f"I see. {CALL}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        tools: Any = [TOOL]
        whole = client.responses.create(model="m", input="hi", tools=tools)
        assert whole.output_text == "I see. "
        with client.responses.stream(model="m", input="hi", tools=tools) as events:
            kinds = [event.type for event in events]
            final = events.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "I see. "
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert json.loads(call.arguments) == ARGUMENTS
