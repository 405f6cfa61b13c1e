# mypy: ignore-errors
"""openai: chat, streams, parse, tools, completions, responses, models, errors; also without waiting (async)."""

import asyncio
import json
import os

import openai
import pytest
from pydantic import BaseModel

BASE, MODEL = os.environ["OCTAVO_URL"] + "/v1", os.environ["OCTAVO_MODEL"]
USER = [{"role": "user", "content": "Say hello in one word."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Pet(BaseModel):
    name: str
    legs: int


def chats(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    whole = client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_completion_tokens=24)
    assert whole.choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        temperature=0,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    scored = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [len(entry.top_logprobs) for entry in scored.choices[0].logprobs.content] == [2, 2, 2]


def shapes(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "A dog called Rex."}],
        response_format=Pet,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(parsed.choices[0].message.parsed, Pet)
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "A dog called Rex."}],
        response_format=Pet,
        temperature=0,
        max_tokens=200,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert kinds[-1] in ("content.done", "chunk")
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


def tools(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Weather in Rome?"}], "tools": [TOOL]}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, finish in (("required", "tool_calls"), (named, "stop")):
        whole = client.chat.completions.create(**asked, tool_choice=choice, temperature=0, max_tokens=200)
        assert whole.choices[0].finish_reason == finish
        (call, *_) = whole.choices[0].message.tool_calls
        assert "city" in json.loads(call.function.arguments)
        joined = ""
        for chunk in client.chat.completions.create(
            **asked, tool_choice=choice, temperature=0, max_tokens=200, stream=True
        ):
            for part in chunk.choices[0].delta.tool_calls or []:
                joined += (part.function.arguments or "") if part.index == 0 else ""
        assert json.loads(joined) == json.loads(call.function.arguments)
    called = [
        *asked["messages"],
        {"role": "assistant", "tool_calls": [call.model_dump()], "content": None},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(model=MODEL, messages=called, tools=[TOOL], max_tokens=8)
    assert after.choices[0].finish_reason in ("stop", "length")
    parsed = client.chat.completions.parse(**asked, tool_choice=named, temperature=0, max_tokens=200)
    assert set(parsed.choices[0].message.tool_calls[0].function.parsed_arguments or {"city": 0}) == {"city"}


def completions(client: openai.OpenAI) -> None:
    scored = client.completions.create(model=MODEL, prompt="One two three", echo=True, logprobs=1, max_tokens=1)
    found = scored.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 4
    assert found.token_logprobs[0] is None
    several = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=2, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=16)
    assert whole.output_text
    assert whole.usage.input_tokens > 0
    with client.responses.stream(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=16) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")][:2] == [0, 1]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    parsed = client.responses.parse(
        model=MODEL, input="A dog called Rex.", text_format=Pet, temperature=0, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Pet)
    tool = {"type": "function", **dict(TOOL["function"].items())}
    called = client.responses.create(
        model=MODEL, input="Weather in Rome?", tools=[tool], tool_choice="required", temperature=0
    )
    assert any(item.type == "function_call" for item in called.output)


def refused(call, kind, code, **fields) -> None:
    with pytest.raises(kind) as error:
        call(**{"model": MODEL, **fields})
    assert error.value.code == code


def errors(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create
    refused(chat, openai.NotFoundError, "model_not_found", model="other", messages=USER)
    refused(chat, openai.BadRequestError, "invalid_type_or_value", messages=USER, temperature=3)
    refused(chat, openai.BadRequestError, "invalid_value", messages=USER, stop=[""])
    refused(client.embeddings.create, openai.BadRequestError, "unsupported_endpoint", input="a")


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        many = [client.chat.completions.create(model=MODEL, messages=USER, max_tokens=4) for _ in range(4)]
        assert all(answer.choices[0].message.content for answer in await asyncio.gather(*many))


with openai.OpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
    for part in (chats, shapes, tools, completions, responses, errors):
        part(client)
asyncio.run(asynchronous())
