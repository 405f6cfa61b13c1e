"""Policies of a running daemon: set at a step boundary under streams, losing nothing, and set again in a successor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest

from octavo.core.plugins import installed
from octavo.core.policy.command import change
from octavo.core.policy.load import METHODS
from tests.policies.streams import answers
from tests.processes.daemon import Daemon, daemon, eventually

SWAPS = 50


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


def test_policies_are_set_under_streams_and_outlive_a_scheduler(service: Daemon) -> None:
    expected = anyio.run(answers, service.run_dir)

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
            under_change.update(await answers(service.run_dir))

    anyio.run(while_they_change)
    assert under_change == expected
    eventually("both were set", lambda: len(swapped(service)) == 2)
    assert {new for _, new in swapped(service)} == {"fair", "slru"}

    service.wait_replaced("scheduler", service.kill("scheduler"))
    eventually("the successor has it too", lambda: [new for _, new in swapped(service)].count("fair") == 2)
    service.wait_replaced("executor", service.kill("executor"))
    eventually("the new pool has it too", lambda: [new for _, new in swapped(service)].count("slru") == 2)
    assert anyio.run(answers, service.run_dir) == expected


def test_fifty_swaps_under_load_lose_no_request_and_change_no_answer(service: Daemon) -> None:
    """Of every group and every installed policy in turn, by the function behind `octavo policy set`."""
    expected = anyio.run(answers, service.run_dir)
    before = len(swapped(service))
    by_group = [[(group, name) for name in installed(f"octavo.{group}")] for group in METHODS]
    settings = [names[i % len(names)] for i in range(SWAPS // len(by_group)) for names in by_group]
    rounds: list[dict[int, str]] = []

    async def under_load() -> None:
        done = anyio.Event()

        async def swap_all() -> None:
            for group, name in settings:
                assert await anyio.to_thread.run_sync(change, f"{group}={name}", (), service.run_dir) == 0
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(swap_all)
            while not done.is_set() or not rounds:
                rounds.append(await answers(service.run_dir))

    anyio.run(under_load)
    assert len(settings) == SWAPS
    assert all(got == expected for got in rounds)
    eventually("all were set", lambda: len(swapped(service)) - before >= SWAPS)
    assert len(swapped(service)) - before == SWAPS
    assert not service.events("policy.not_swapped") + service.events("policy.rejected")
    assert service.actors()["scheduler"].restarts <= 1, "of the test before"


def test_a_policy_that_cannot_be_had_is_told_before_anything_changes(service: Daemon) -> None:
    before = swapped(service)
    told = octavo("policy", "set", "batching=unfair", "--run", str(service.run_dir))
    assert told.returncode == 2
    assert "no octavo.batching plugin is called 'unfair'" in told.stderr
    told = octavo("policy", "set", "luck=fair", "--run", str(service.run_dir))
    assert told.returncode == 1
    assert "the groups are batching, chunking" in told.stderr
    told = octavo("policy", "set", "speculation=auto", "--run", str(service.run_dir))
    assert told.returncode == 1
    assert "now say which: adaptive, or off" in told.stderr
    assert swapped(service) == before


def test_list_and_show_speak_of_every_group() -> None:
    lines = octavo("policy", "list").stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"batching", "chunking", "preemption", "eviction", "speculation"}
    assert sum("*" in line for line in lines) == 5
    shown = octavo("policy", "show", "batching", "dynamic").stdout
    assert "policies.options.batching.delay_ms = 100.0" in shown
