"""Faults that users of other engines met, by their names in the list of cases: who was preempted, who left, who asked
too much. H48 is in tests/speculation/test_switches.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.client.stream import RequestRefused, Stream
from octavo.core.messages import Params, Sampling, Text
from octavo.core.policy.rules import MAX_SENT_BACK
from octavo.core.trace.catalogue import RequestAdmitted, RequestPreempted
from octavo.plugins.policykit.engine import Asked
from tests.policies.test_behaviour import chosen, run
from tests.processes.daemon import Daemon, daemon, eventually

S = 1_000_000_000
ROUNDS = 5


@pytest.fixture(scope="module")
def service() -> Iterator[Daemon]:
    with daemon("scheduler.max_sequences=2") as service:
        service.wait_ready()
        yield service


def long_and_short() -> list[Asked]:
    """Two long ones outgrow a small pool together; short ones arrive all the time."""
    long = [Asked(0, 40, 200, "ada"), Asked(S // 10, 40, 200, "ada")]
    return long + [Asked(i * S // 2, 8, 6, "bob") for i in range(1, 60)]


@pytest.fixture(scope="module")
def in_a_roomy_pool() -> list[list[int]]:
    asked = long_and_short()
    run(asked, chosen(), blocks=1000)
    return [one.tokens for one in asked]


@pytest.mark.parametrize(
    ("batching", "preemption"),
    [("fcfs", "lifo"), ("shortest", "cheapest"), ("prefix-first", "lifo"), ("priority", "priority"), ("fair", "lifo")],
)
def test_h34_who_was_preempted_gets_on_while_newcomers_stream_in(
    batching: str, preemption: str, in_a_roomy_pool: list[list[int]]
) -> None:
    asked = long_and_short()
    policies = chosen(batching=batching, preemption=preemption)
    engine = run(asked, policies, blocks=90, slots=4)
    sent_back = Counter(e.request_id for e in engine.events if isinstance(e, RequestPreempted))
    assert sent_back, "the pool is not small enough"
    assert max(sent_back.values()) <= MAX_SENT_BACK
    for request_id, times in sent_back.items():
        admitted = [e for e in engine.events if isinstance(e, RequestAdmitted) and e.request_id == request_id]
        assert len(admitted) == times + 1
        assert max(e.waited_ns for e in admitted) < 40 * S
    assert [one.tokens for one in asked] == in_a_roomy_pool


@pytest.mark.anyio
async def test_h41_nobody_waits_once_all_have_left(service: Daemon) -> None:
    params = Params(max_tokens=1000, sampling=Sampling(temperature=0.0), ignore_eos=True)

    def numbers(*names: str) -> list[int | None]:
        return [service.actors()["scheduler"].stats.get(name) for name in names]

    async with Client.connect(service.run_dir) as client:
        await client.wait_ready(60)
        for _ in range(ROUNDS):
            streams: list[Stream] = [await client.generate(Text(f"prompt {i}"), params) for i in range(100)]
            await anyio.to_thread.run_sync(
                eventually, "a hundred are there", lambda: numbers("requests", "waiting") == [100, 98]
            )
            for stream in streams:
                await stream.aclose()
            await anyio.to_thread.run_sync(
                eventually, "nobody is there", lambda: numbers("waiting", "running", "requests") == [0, 0, 0]
            )


@pytest.mark.anyio
async def test_h44_a_prompt_that_is_too_long_is_refused_and_the_next_one_served(service: Daemon) -> None:
    params: dict[str, Any] = {"params": Params(max_tokens=4)}
    async with Client.connect(service.run_dir) as client:
        await client.wait_ready(60)
        async with await client.generate(Text("x" * 8300), **params) as long:
            with pytest.raises(RequestRefused, match="the context is 8192 tokens"):
                await long.accepted()
        async with await client.generate(Text("short"), **params) as short:
            assert await short.accepted() == 5
            assert sum([len(piece.ids) async for piece in short]) == 4
