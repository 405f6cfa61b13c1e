"""The whole daemon over HTTP against its bare executor: `python tests/bench/daemon_cpu.py`.

The default model on the native executor. Some streams decode side by side, after prompts of 128 ids each; the rate is
that of the tokens between the moment when all have their first one and the moment when the first stream ends. Bare is
the same decoding by calls into the step library, in this process, while the daemon rests; the two take turns, so a
ratio is of neighbours in time. Processor time per token is read from the system over the same window, by process; the
client is this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.core.models.locate import locate
from octavo.core.rundir import read
from octavo.core.supervisor.status import ask
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.native.library import Kind, int32s, load
from octavo.executors.native.program import Inputs, Native, Pool, Weights
from octavo.executors.threads import default_threads

SIZE, PROMPT = 16, 128
RESULTS = Path(__file__).parents[1] / "results" / "daemon_cpu.md"


class Sample(NamedTuple):
    """Tokens a second of both, and processor time in µs a token by process of the daemon."""

    bare: float
    daemon: float
    cpu: dict[str, float]


class Bare:
    def __init__(self, streams: int, tokens: int) -> None:
        files = locate("default")
        self._each = -(-(PROMPT + tokens) // SIZE)
        weights = Weights(load(), open_checkpoint(files), exact=False)
        self._native = Native(weights, Pool(streams * self._each, SIZE, Kind.BF16), default_threads())
        self._streams, self._tokens = streams, tokens

    def rate(self) -> float:
        n, each = self._streams, self._each
        starts, tables = np.arange(n + 1) * each, int32s(range(n * each))
        none = int32s([])
        ids = np.random.default_rng(1).integers(1000, 40000, (n, PROMPT))
        for i in range(n):
            place = int32s([0]), int32s([0, each])
            rows = int32s(ids[i]), int32s(range(PROMPT)), int32s([0] * PROMPT)
            self._native.step(
                Inputs(*rows, tables[i * each :], place[1], int32s([PROMPT - 1]), int32s([-1]), none, none)
            )
        last = int32s([7] * n)
        every, best_only = int32s(range(n)), int32s([-1] * n)
        started = time.perf_counter()
        for step in range(self._tokens - 1):
            where = int32s([PROMPT + step] * n)
            last = self._native.step(
                Inputs(last, where, every, tables, int32s(starts), every, best_only, none, none)
            ).best
        return n * (self._tokens - 1) / (time.perf_counter() - started)


@contextlib.contextmanager
def serving(*sets: str) -> Iterator[Path]:
    """A ready daemon on a free port; its run folder."""
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder:
        run = Path(folder) / "run"
        words = [f"run_dir={run}", "server.port=0", "kv.prefix_cache=false", *sets]
        log = (Path(folder) / "log").open("wb")
        command = [sys.executable, "-m", "octavo", "serve", *(w for word in words for w in ("--set", word))]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        try:
            while not _ready(run):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the daemon did not start:\n{(Path(folder) / 'log').read_text()}")
                time.sleep(0.05)
            yield run
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            log.close()


def _ready(run: Path) -> bool:
    info = read(run)
    status = None if info is None else ask(info)
    return status is not None and all(actor.state == "ready" for actor in status.actors)


def pids(run: Path) -> dict[str, int]:
    info = read(run)
    assert info is not None
    status = ask(info)
    assert status is not None
    return {"supervisor": info.pid} | {a.role: a.pid for a in status.actors if a.pid is not None}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Window:
    """From when all streams have a token to when the first one ends."""

    def __init__(self, streams: int, processes: dict[str, int]) -> None:
        self._waiting, self._processes = streams, processes
        self._tokens = 0
        self._start = self._end = 0.0
        self._before: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def first(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._before = {role: cpu_s(pid) for role, pid in self._processes.items()}
            self._start = time.perf_counter()

    def token(self) -> None:
        if self._start and not self._end:
            self._tokens += 1

    def end(self) -> None:
        if not self._end:
            self._end = time.perf_counter()
            after = {role: cpu_s(pid) for role, pid in self._processes.items()}
            self.cpu = {role: (after[role] - self._before[role]) / self._tokens * 1e6 for role in after}

    @property
    def rate(self) -> float:
        return self._tokens / (self._end - self._start)


async def stream(port: int, i: int, tokens: int, window: Window) -> None:
    ids = np.random.default_rng(i).integers(1000, 40000, PROMPT).tolist()
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n"
    )
    writer.write(f"{head}\r\n".encode() + data)
    seen = 0
    while seen < tokens - 1:
        piece = await reader.read(65536)
        if not piece:
            raise RuntimeError(f"stream {i} ended after {seen} pieces")
        for _ in range(piece.count(b"data: {")):  # a token may share its event with the next when the daemon is behind
            seen += 1
            if seen == 1:
                window.first()
            else:
                window.token()
    window.end()
    writer.close()


async def load_once(run: Path, streams: int, tokens: int) -> Window:
    info = read(run)
    assert info is not None
    assert info.address is not None
    port = int(info.address.rpartition(":")[2])
    window = Window(streams, pids(run) | {"client": os.getpid()})
    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        for i in range(streams):
            tasks.create_task(stream(port, i, tokens, window))
    return window


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--set", dest="sets", nargs="*", default=[], help="of the daemon's configuration")
    options.add_argument("--write", action="store_true", help=f"to {RESULTS.name}")
    given = options.parse_args()
    found: dict[int, list[Sample]] = {}
    with serving(*given.sets) as run:
        for streams in given.streams:
            bare = Bare(streams, given.tokens)
            asyncio.run(load_once(run, streams, given.tokens))
            for _ in range(given.pairs):
                rate = bare.rate()
                window = asyncio.run(load_once(run, streams, given.tokens))
                found.setdefault(streams, []).append(Sample(rate, window.rate, window.cpu))
    text = report(found)
    print(text)
    if given.write:
        RESULTS.write_text(text)


def report(found: dict[int, list[Sample]]) -> str:
    assert __doc__ is not None
    load = f"{default_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}."
    lines = ["# The daemon on the CPU", "", __doc__.strip(), "", load, ""]
    lines.append("| streams | bare tok/s | daemon tok/s | daemon / bare (quartiles) | pairs |")
    lines.append("|---" * 5 + "|")
    for streams, samples in found.items():
        ratios = [sample.daemon / sample.bare for sample in samples]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        bare, daemon = statistics.median(s.bare for s in samples), statistics.median(s.daemon for s in samples)
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {streams} | {bare:.0f} | {daemon:.0f} | {spread} | {len(samples)} |")
    lines += ["", "Processor time, µs a token:", ""]
    roles = list(next(iter(found.values()))[0].cpu)
    lines.append("| streams | " + " | ".join(roles) + " | all but executor and client |")
    lines.append("|---" * (len(roles) + 2) + "|")
    for streams, samples in found.items():
        cpu = {role: statistics.median(sample.cpu[role] for sample in samples) for role in roles}
        rest = sum(value for role, value in cpu.items() if role not in ("executor", "client"))
        lines.append(f"| {streams} | " + " | ".join(f"{value:.0f}" for value in cpu.values()) + f" | {rest:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
