"""Policies of a running daemon: set at a step boundary under streams, losing nothing, and set again in a successor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.messages import Params, Sampling, Text
from tests.processes.daemon import Daemon, daemon, eventually

STREAMS = 8


@pytest.fixture(scope="module")
def service() -> Iterator[Daemon]:
    with daemon("supervisor.max_restarts=100") as service:
        service.wait_ready()
        yield service


def octavo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words], capture_output=True, text=True, timeout=60, check=False
    )


def swapped(service: Daemon) -> list[tuple[object, object]]:
    return [(event["role"], event["new"]) for event in service.events("policy.swapped")]


async def answers(service: Daemon) -> dict[int, str]:
    got = dict.fromkeys(range(STREAMS), "")

    async def one(client: Client, seed: int) -> None:
        params = Params(max_tokens=400, sampling=Sampling(temperature=0.0))
        async with await client.generate(Text(f"prompt {seed}"), params, tenant=f"t{seed % 2}") as stream:
            async for piece in stream:
                got[seed] += piece.text

    with anyio.fail_after(90):
        async with Client.connect(service.run_dir) as client, anyio.create_task_group() as streams:
            await client.wait_ready(60)
            for seed in range(STREAMS):
                streams.start_soon(one, client, seed)
    return got


def test_policies_are_set_under_streams_and_outlive_a_scheduler(service: Daemon) -> None:
    expected = anyio.run(answers, service)

    under_change: dict[int, str] = {}

    async def while_they_change() -> None:
        async with anyio.create_task_group() as group:

            async def change() -> None:
                words = ("batching=fair", "--option", "takeover=true", "--run", str(service.run_dir))
                told = await anyio.to_thread.run_sync(octavo, "policy", "set", *words)
                assert told.returncode == 0, told.stderr
                told = await anyio.to_thread.run_sync(
                    octavo, "policy", "set", "eviction=slru", "--run", str(service.run_dir)
                )
                assert told.returncode == 0, told.stderr

            group.start_soon(change)
            under_change.update(await answers(service))

    anyio.run(while_they_change)
    assert under_change == expected
    eventually("both were set", lambda: len(swapped(service)) == 2)
    assert {new for _, new in swapped(service)} == {"fair", "slru"}

    service.wait_replaced("scheduler", service.kill("scheduler"))
    eventually("the successor has it too", lambda: [new for _, new in swapped(service)].count("fair") == 2)
    service.wait_replaced("executor", service.kill("executor"))
    eventually("the new pool has it too", lambda: [new for _, new in swapped(service)].count("slru") == 2)
    assert anyio.run(answers, service) == expected


def test_a_policy_that_cannot_be_had_is_told_before_anything_changes(service: Daemon) -> None:
    before = swapped(service)
    told = octavo("policy", "set", "batching=unfair", "--run", str(service.run_dir))
    assert told.returncode == 2
    assert "no octavo.batching plugin is called 'unfair'" in told.stderr
    told = octavo("policy", "set", "luck=fair", "--run", str(service.run_dir))
    assert told.returncode == 1
    assert "the groups are batching, chunking" in told.stderr
    assert swapped(service) == before


def test_list_and_show_speak_of_every_group() -> None:
    lines = octavo("policy", "list").stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"batching", "chunking", "preemption", "eviction", "speculation"}
    assert sum("*" in line for line in lines) == 5
    shown = octavo("policy", "show", "batching", "dynamic").stdout
    assert "policies.options.batching.delay_ms = 100.0" in shown
