# mypy: ignore-errors
"""pydantic-ai: text, streams, typed output and tools, on chat completions and on responses."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL = os.environ["OCTAVO_URL"] + "/v1", os.environ["OCTAVO_MODEL"]
PROVIDER = OpenAIProvider(base_url=BASE, api_key="none")


class Pet(BaseModel):
    name: str
    legs: int


async def main() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=PROVIDER)
        how = {"temperature": 0.0, "max_tokens": 200}
        plain = Agent(model, model_settings={**how, "max_tokens": 12})
        whole = await plain.run("Say hello.")
        assert whole.output
        async with plain.run_stream("Say hello.") as stream:
            assert await stream.get_output() == whole.output
        typed = Agent(model, output_type=Pet, model_settings=how, retries=2)
        assert isinstance((await typed.run("A dog called Rex.")).output, Pet), kind
        native = Agent(model, output_type=NativeOutput(Pet), model_settings=how, retries=2)
        assert isinstance((await native.run("A dog called Rex.")).output, Pet), kind


asyncio.run(main())
