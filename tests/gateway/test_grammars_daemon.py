"""Shaped answers through the whole service, with each engine: several choices of many requests at once, in chunks, with
guesses, in a pool too small for all."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from tests import grammars
from tests.processes.daemon import daemon

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
SMALL = ("kv.tokens=384", "scheduler.chunk_budget=32", "scheduler.max_sequences=12", "speculation.drafter=ngram")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def schema_of(i: int) -> dict[str, Any]:
    """Each of its own; its answers are long enough that the pool runs short."""
    item = {"type": "string", "minLength": 8, "maxLength": 16}
    return {
        "type": "object",
        "properties": {f"list {i}": {"type": "array", "items": item, "minItems": 3, "maxItems": 4}, "n": {"const": i}},
        "required": [f"list {i}", "n"],
        "additionalProperties": False,
    }


def shaped(i: int) -> dict[str, Any]:
    said = {"name": "answer", "schema": schema_of(i), "strict": True}
    return {
        "messages": [{"role": "user", "content": f"Tell me of {i} things. " * 4}],
        "response_format": {"type": "json_schema", "json_schema": said},
        "temperature": 0.8,
        "seed": i,
        "n": 2,
    }


@pytest.mark.parametrize("name", grammars.NAMES)
async def test_every_choice_keeps_to_its_own_schema_whatever_happens_meanwhile(name: str) -> None:
    with daemon(f"executor.grammar={name}", *SMALL, gateway=True, model="default") as running:
        await anyio.to_thread.run_sync(running.wait_ready)
        async with httpx.AsyncClient(base_url=str(running.info().address), timeout=120) as client:

            async def ask(i: int) -> None:
                answer = (await client.post(CHAT, json=shaped(i))).json()
                for choice in answer["choices"]:
                    assert choice["finish_reason"] == "stop", choice
                    jsonschema.validate(json.loads(choice["message"]["content"]), schema_of(i))
                assert len(answer["choices"]) == 2

            async with anyio.create_task_group() as tasks:
                for i in range(6):
                    tasks.start_soon(ask, i)
            refused = await client.post(CHAT, json={**shaped(0), "response_format": bad()})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "invalid_grammar"
        assert "/properties/a/not" in refused.json()["error"]["message"]
        assert await anyio.to_thread.run_sync(running.told, "request.preempted")


def bad() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "integer"}}}}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
