"""Runs many worlds: `python -m tests.fuzz.campaign FIRST COUNT` prints one JSON line, for the tests and by hand."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tests.fuzz.world import Setup, World

MUST_HAPPEN = (
    "RequestPreempted",
    "RequestRebased",
    "cancel",
    "an answer comes back in a prompt",
    "RequestFailed",
    "evictions",
    "partial block copied for a fork",
    "block swapped out",
    "block swapped in",
    "duplicate block re-pointed",
    "slot reused while its former owner's result is in flight",
    "slot reused while its former owner's ack is in flight",
    "fork of a parent that was rebased",
    "evicted between hint and open",
    "crash between result and delivery",
    "frame fenced",
    "a run failed",
    "a run failed whose residency was released",
    "a failure lost with the scheduler",
    "opened where a run had failed",
    "plan of several rounds",
    "a sequence ended before the last round",
    "a plan of several rounds was cut short",
    "the executor was asked to hasten",
    "flush of what is in use",
    "flush of what nobody uses",
    "crash of SCHEDULER",
    "crash of KV",
    "crash of EXECUTOR",
    "crash of TOKENIZER",
)
"""What a campaign is for; one that never saw one of these has proved nothing about it."""


def failure(setup: Setup) -> str | None:
    """Why the run fails, or None if it does not."""
    try:
        World(setup).run()
    except Exception:  # noqa: BLE001 - whatever a fault makes the cores do is a finding
        return traceback.format_exc(limit=-5)
    return None


def simpler(setup: Setup) -> Iterator[Setup]:
    """Setups with one thing less."""
    if setup.requests > 1:
        yield replace(setup, requests=setup.requests // 2)
        yield replace(setup, requests=setup.requests - 1)
    for crash in setup.crashes:
        yield replace(setup, crashes=tuple(c for c in setup.crashes if c is not crash))
    plain = (
        replace(setup, odd_policies=False),
        replace(setup, policies=()),
        replace(setup, forks=False),
        replace(setup, cancels=False),
        replace(setup, stops=False),
        replace(setup, flushes=False),
    )
    yield from (candidate for candidate in plain if candidate != setup)
    if setup.failures:
        yield replace(setup, failures=False)
    if setup.rounds:
        yield replace(setup, rounds=False)
    if setup.host_blocks:
        yield replace(setup, host_blocks=0)
    if setup.drafts:
        yield replace(setup, drafts=0)
    if setup.depth > 1:
        yield replace(setup, depth=setup.depth - 1)


def shrink(setup: Setup, tries: int = 200) -> tuple[Setup, str]:
    """The simplest setup near this failing one that still fails, and how."""
    why = failure(setup) or "passes when repeated"
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in simpler(setup):
            tries -= 1
            if (found := failure(candidate)) is not None:
                setup, why, progress = candidate, found, True
                break
    return setup, why


def campaign(first: int, count: int) -> tuple[Counter[str], int, str]:
    """(events seen, cell reads verified, first failure shrunk or "") over seeds first, first+1, …"""
    seen: Counter[str] = Counter()
    reads = 0
    for seed in range(first, first + count):
        setup = Setup.draw(seed)
        world = World(setup)
        try:
            world.run()
        except Exception:  # noqa: BLE001 - as above
            if os.environ.get("FUZZ_SHRINK", "1") == "0":
                return seen, reads, f"seed {seed}: {traceback.format_exc(limit=-3)}"
            smallest, why = shrink(setup)
            return seen, reads, f"seed {seed}, shrunk to {smallest}\n{why}"
        seen += world.seen
        reads += world.reads_checked
    return seen, reads, ""


if __name__ == "__main__":
    counted, verified, failed = campaign(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"seen": counted, "reads": verified, "failed": failed}))
