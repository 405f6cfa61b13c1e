# mypy: ignore-errors
"""openai-agents: a loop with a tool, whole and streamed, on responses (its default) and on chat completions."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

BASE, MODEL = os.environ["OCTAVO_URL"] + "/v1", os.environ["OCTAVO_MODEL"]
ASKED: list[str] = []


@function_tool(strict_mode=False)  # held to its schema, a small model calls it again and again
def weather(city: str) -> str:
    """The weather in a city."""
    ASKED.append(city)
    return "sunny"


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            agent = Agent(
                name="helper",
                instructions="You help.",
                model=kind(model=MODEL, openai_client=client),
                tools=[weather],
                model_settings=ModelSettings(
                    temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False
                ),
            )
            ASKED.clear()
            whole = await Runner.run(agent, "Weather in Rome?", max_turns=4)
            assert whole.final_output
            assert ASKED, kind
            streamed = Runner.run_streamed(agent, "Weather in Rome?", max_turns=4)
            kinds = {event.type async for event in streamed.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= kinds
            assert streamed.final_output == whole.final_output


asyncio.run(main())
