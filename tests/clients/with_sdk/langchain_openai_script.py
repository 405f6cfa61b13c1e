# mypy: ignore-errors
"""langchain-openai: invoke, stream, batch, tools, structured output by schema and by function."""

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

BASE, MODEL = os.environ["OCTAVO_URL"] + "/v1", os.environ["OCTAVO_MODEL"]


class Pet(BaseModel):
    """An animal in a house."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=9)


class Place(BaseModel):
    """Closed and short, since a small model does not end by itself."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)


@tool(args_schema=Place)
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def model(**fields) -> ChatOpenAI:
    return ChatOpenAI(base_url=BASE, api_key="none", model=MODEL, temperature=0, max_retries=0, **fields)


whole = model(max_tokens=12).invoke("Say hello.")
assert whole.content
assert whole.usage_metadata["output_tokens"] > 0
parts = list(model(max_tokens=12, stream_usage=True).stream("Say hello."))
assert "".join(part.content for part in parts) == whole.content
assert any(part.usage_metadata for part in parts)
assert [one.content for one in model(max_tokens=12).batch(["Say hello.", "Say hello."])] == [whole.content] * 2
called = model(max_tokens=120).bind_tools([weather], tool_choice="weather", strict=True).invoke("Weather in Rome?")
assert called.tool_calls[0]["name"] == "weather"
assert weather.invoke(called.tool_calls[0]["args"]).startswith("sunny")
for method in ("json_schema", "function_calling"):
    shaped = model(max_tokens=200).with_structured_output(Pet, method=method, strict=True).invoke("A dog called Rex.")
    assert isinstance(shaped, Pet), (method, shaped)
assert OpenAI(base_url=BASE, api_key="none", model=MODEL, max_tokens=5, max_retries=0).invoke("Once upon")
