"""Cases about the daemon as a whole: two at one address, the end under load, and what a restart leaves in the cache."""

from __future__ import annotations

import json
import signal
from typing import Any

import anyio
import httpx
import pytest

from tests.processes.daemon import Daemon, daemon, eventually

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "tell me"}], "temperature": 0, "stream": True}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def address(running: Daemon) -> str:
    found = running.info().address
    assert found is not None
    return found


def test_h39_the_second_at_one_address_ends_before_it_loads_anything() -> None:
    with daemon(gateway=True) as first:
        first.wait_ready()
        port = int(address(first).rpartition(":")[2])
        with daemon(gateway=True, port=port, model="default") as second:
            assert second.wait_end() != 0
            assert f"127.0.0.1:{port}" in second.log
            assert "executor:" not in second.log, "it says so when a model is loaded"
        assert httpx.get(f"{address(first)}/health").status_code == 200


async def told(client: httpx.AsyncClient, begun: list[bool], tokens: int, ends: list[str]) -> None:
    """Stream to the end, and note how it ended: the finish, or `error`."""
    try:
        async with client.stream("POST", CHAT, json={**BODY, "max_tokens": tokens}) as response:
            begun.append(True)
            last: dict[str, Any] = {}
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])
    except httpx.HTTPError as error:
        ends.append(repr(error))
        return
    refused = response.status_code == 503 or "error" in last
    ends.append("error" if refused else last["choices"][0]["finish_reason"] or "nothing")


@pytest.mark.parametrize("again", [False, True])
async def test_h40_whoever_has_begun_is_answered_or_told(again: bool) -> None:
    """Three run and two wait. After one SIGTERM all of them finish and nobody new comes in; after a second one each is
    told by an error. In both cases the exit code is 0, and no process is left."""
    with daemon("scheduler.max_sequences=3", gateway=True) as short:
        await anyio.to_thread.run_sync(short.wait_ready)
        ends: list[str] = []
        tokens = 3500 if again else 300
        begun: list[bool] = []
        connection = httpx.AsyncClient(base_url=address(short), timeout=60)
        async with connection as client, anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(told, client, begun, tokens, ends)
            await anyio.to_thread.run_sync(eventually, "three run", lambda: len(begun) >= 3)
            short.process.send_signal(signal.SIGTERM)
            with anyio.fail_after(30):
                while (await client.get("/health")).status_code != 503:
                    await anyio.sleep(0.01)
                assert (await client.post(CHAT, json=BODY)).status_code == 503
            if again:
                short.process.send_signal(signal.SIGTERM)
        assert len(ends) == 5
        assert set(ends) <= ({"error", "length"} if again else {"length"}), ends
        assert await anyio.to_thread.run_sync(short.wait_end) == 0


def test_h36_what_is_cached_is_gone_with_the_kv_manager_and_with_a_flush() -> None:
    with daemon(gateway=True) as running:
        running.wait_ready()

        def cached() -> int:
            body = {**BODY, "messages": [{"role": "user", "content": "x" * 64}], "stream": False, "max_tokens": 1}
            response = httpx.post(f"{address(running)}{CHAT}", json=body, timeout=60).json()
            found: int = response["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert cached() == 0
        assert cached() > 0
        running.wait_replaced("kv", running.kill("kv"))
        assert cached() == 0
        assert cached() > 0
        flushed = httpx.post(f"{address(running)}/reset_prefix_cache", timeout=60).json()
        assert flushed["freed"] > 0
        assert flushed["in_use"] == 0
        assert cached() == 0
