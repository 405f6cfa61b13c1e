"""Each way to ask for a shape reaches the engine as the same few kinds of grammar."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from octavo.core.messages import Grammar
from tests.gateway.test_generate import USER, post

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("schema", '{"type": "object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("schema", AS_TEXT),
        ),
        ({"guided_json": SCHEMA}, Grammar("schema", AS_TEXT)),
        ({"guided_json": AS_TEXT}, Grammar("schema", AS_TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"guided_grammar": "start: x"}, Grammar("lark", "start: x")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("schema", AS_TEXT)),
        ({"structured_outputs": {"json_object": True}}, Grammar("schema", '{"type": "object"}')),
    ],
)
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_every_way_to_ask(
    http: httpx.AsyncClient, engine: Any, route: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    asked: dict[str, Any] = {"messages": USER} if route == "chat/completions" else {"prompt": "hi"}
    response = await post(http, route, **asked, **fields)
    assert response.status_code == 200, response.text
    ((_, _, params),) = engine.seen
    assert params.sampling.grammar == grammar


async def test_a_schema_of_calls_keeps_the_definitions_of_its_tools(http: httpx.AsyncClient, engine: Any) -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    engine.answer = '[{"name": "f", "arguments": {"x": 1}}]'
    body = {"messages": USER, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    assert (await post(http, "chat/completions", **body)).status_code == 200
    ((_, _, params),) = engine.seen
    schema = json.loads(params.sampling.grammar.text)
    assert schema["$defs"] == {"X": {"type": "integer"}}
    assert schema["maxItems"] == 1


def test_the_official_clients_parse_helper(url: str, engine: Any) -> None:
    class Answer(pydantic.BaseModel):
        a: int

    engine.answer = '{"a": 7}'
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        messages: Any = USER
        parsed = client.chat.completions.parse(model="m", messages=messages, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(a=7)
    ((_, _, params),) = engine.seen
    assert json.loads(params.sampling.grammar.text)["required"] == ["a"]
