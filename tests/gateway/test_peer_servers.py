"""What the comparison with other servers counts and stops (`tests/peers`): all processes, whoever started them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.servers import Running
from tests.processes.daemon import eventually

APART = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
BUSY = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\nsys.stdin.read()"


@pytest.fixture
def started() -> Iterator[tuple[Running, int]]:
    """A process, and another one with a session of its own that it started and that has taken half a second."""
    with subprocess.Popen(
        [sys.executable, "-c", APART, BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        second = int(first.stdout.readline())
        first.stdout.readline()
        yield Running(0, first.pid), second
        assert first.stdin is not None
        first.stdin.close()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_processes_with_sessions_of_their_own_count(started: tuple[Running, int]) -> None:
    assert started[0].cpu_s() >= 0.4


def test_none_of_them_runs_while_they_are_stopped(started: tuple[Running, int]) -> None:
    running, second = started
    with running.stopped():
        eventually("both to stop", lambda: state(running.pid) == state(second) == "T" or None)
    eventually("both to go on", lambda: "T" not in (state(running.pid), state(second)) or None)
