"""The whole daemon over HTTP against its bare executor: `python tests/bench/daemon_cpu.py`.

The default model on the native executor. Some streams decode side by side, after prompts of 128 ids each, from texts.
The rate is that between the moment when all have their first token and the moment when the first stream ends; events
say how many tokens have come. Bare is the same decoding by calls into the step library, in this process, while the
daemon rests; the two take turns, so a ratio is of neighbours in time. Processor time per token is read from the system
over the same window, by process; the client is this process. With `--against` the daemon of another Octavo takes turns
too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
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
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.native.library import Kind, int32s, load
from octavo.executors.native.program import Inputs, Native, Pool
from octavo.executors.native.weights import Weights
from octavo.executors.threads import default_threads
from octavo.plugins.quality.texts import TEXTS

SIZE, PROMPT = 16, 128
DONE = b"data: [DONE]"
RESULTS = Path(__file__).parents[1] / "results" / "daemon_cpu.md"


class Sample(NamedTuple):
    """Tokens a second of both, and processor time in µs a token by process of the daemon."""

    bare: float
    daemon: float
    cpu: dict[str, float]


class Bare:
    def __init__(self, given: list[list[int]], tokens: int) -> None:
        files = locate("default")
        streams, self._given = len(given), given
        self._each = -(-(PROMPT + tokens) // SIZE)
        weights = Weights(load(), open_checkpoint(files), exact=False)
        self._native = Native(weights, Pool(streams * self._each, SIZE, Kind.BF16), default_threads())
        self._streams, self._tokens = streams, tokens

    def rate(self) -> float:
        n, each = self._streams, self._each
        starts, tables = np.arange(n + 1) * each, int32s(range(n * each))
        none = int32s([])
        last = int32s([0] * n)
        for i in range(n):
            place = int32s([0]), int32s([0, each])
            rows = int32s(self._given[i]), int32s(range(PROMPT)), int32s([0] * PROMPT)
            last[i] = self._native.step(
                Inputs(*rows, tables[i * each :], place[1], int32s([PROMPT - 1]), int32s([-1]), none, none)
            ).best[0]
        every, best_only = int32s(range(n)), int32s([-1] * n)
        started = time.perf_counter()
        for step in range(self._tokens - 1):
            where = int32s([PROMPT + step] * n)
            last = self._native.step(
                Inputs(last, where, every, tables, int32s(starts), every, best_only, none, none)
            ).best
        return n * (self._tokens - 1) / (time.perf_counter() - started)


@contextlib.contextmanager
def serving(*sets: str, python: str = sys.executable) -> Iterator[Path]:
    """A ready daemon on a free port, of the Octavo that `python` has; its run folder."""
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder:
        run = Path(folder) / "run"
        words = [f"run_dir={run}", "server.port=0", "kv.prefix_cache=false", "policies.speculation=off", *sets]
        log = (Path(folder) / "log").open("wb")
        command = [python, "-P", "-m", "octavo", "serve", *(w for word in words for w in ("--set", word))]
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
    """From when all streams have a token to when the first one ends. An event may bring several tokens, and more of
    them when nobody waits: so each says how many have come, and a stream's rate is between two of its own events."""

    def __init__(self, streams: int, processes: dict[str, int]) -> None:
        self._waiting, self._processes = streams, processes
        self._first: list[tuple[float, bytes] | None] = [None] * streams
        self._last: list[tuple[float, bytes] | None] = [None] * streams
        self._start = self._end = 0.0
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}

    def first(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._before = {role: cpu_s(pid) for role, pid in self._processes.items()}
            self._start = time.perf_counter()

    def event(self, stream: int, data: bytes) -> None:
        if self._start and not self._end:
            self._last[stream] = time.perf_counter(), data
            self._first[stream] = self._first[stream] or self._last[stream]

    def end(self) -> None:
        if not self._end:
            self._end = time.perf_counter()
            self._after = {role: cpu_s(pid) for role, pid in self._processes.items()}

    @property
    def rate(self) -> float:
        """Tokens a second, of all streams together."""
        rates = 0.0
        for first, last in zip(self._first, self._last, strict=True):
            assert first is not None
            assert last is not None
            rates += (tokens_at(last[1]) - tokens_at(first[1])) / (last[0] - first[0])
        return rates

    @property
    def cpu(self) -> dict[str, float]:
        tokens = self.rate * (self._end - self._start)
        return {role: (self._after[role] - self._before[role]) / tokens * 1e6 for role in self._after}


def tokens_at(data: bytes) -> int:
    """How many the last event in it says that have come."""
    return int(re.findall(rb'"completion_tokens":(\d+)', data)[-1])


async def stream(port: int, i: int, ids: list[int], tokens: int, window: Window) -> None:
    asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False, "stream": True}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    data = json.dumps({"prompt": ids, "stream_options": usage, **asked}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n"
    )
    writer.write(f"{head}\r\n".encode() + data)
    seen, tail = 0, b""
    while DONE not in tail:
        piece = await reader.read(65536)
        if not piece:
            raise RuntimeError(f"stream {i} ended after {seen} events")
        if b"data: {" in piece and piece.endswith(b"\n\r\n"):  # whole events
            seen += 1
            if seen == 1:
                window.first()
            elif DONE not in piece:
                window.event(i, piece)
        tail = (tail + piece)[-len(DONE) :] if DONE not in piece else DONE
    window.end()
    writer.close()


def some_prompts(n: int) -> list[list[int]]:
    """Of PROMPT ids each, from texts: what goes on from them is text too, an event a token."""
    vocabulary = load_vocabulary(locate("default"))
    ids = [token for text in TEXTS.values() for token in vocabulary.encode(text)]
    return [np.roll(ids, -len(ids) * i // n).tolist()[:PROMPT] for i in range(n)]


async def load_once(run: Path, given: list[list[int]], tokens: int) -> Window:
    info = read(run)
    assert info is not None
    assert info.address is not None
    port = int(info.address.rpartition(":")[2])
    window = Window(len(given), pids(run) | {"client": os.getpid()})
    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        for i, ids in enumerate(given):
            tasks.create_task(stream(port, i, ids, tokens, window))
    return window


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--set", dest="sets", nargs="*", default=[], help="of the daemon's configuration")
    options.add_argument("--against", metavar="PYTHON", help="of another Octavo, whose daemon takes turns too")
    options.add_argument("--write", action="store_true", help=f"to {RESULTS.name}")
    given = options.parse_args()
    found: dict[int, list[Sample]] = {}
    others: dict[int, list[float]] = {}
    with contextlib.ExitStack() as daemons:
        run = daemons.enter_context(serving(*given.sets))
        other = daemons.enter_context(serving(*given.sets, python=given.against)) if given.against else None
        for streams in given.streams:
            prompts = some_prompts(streams)
            bare = Bare(prompts, given.tokens)
            for one in (run, other) if other else (run,):
                asyncio.run(load_once(one, prompts, given.tokens))
            for _ in range(given.pairs):
                rate = bare.rate()
                window = asyncio.run(load_once(run, prompts, given.tokens))
                found.setdefault(streams, []).append(Sample(rate, window.rate, window.cpu))
                if other is not None:
                    others.setdefault(streams, []).append(asyncio.run(load_once(other, prompts, given.tokens)).rate)
    text = report(found, others)
    print(text)
    if given.write:
        RESULTS.write_text(text)


def report(found: dict[int, list[Sample]], others: dict[int, list[float]]) -> str:
    assert __doc__ is not None
    load = f"{default_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}."
    lines = ["# The daemon on the CPU", "", __doc__.strip(), "", load, ""]
    against = ["against the other daemon (quartiles)"] if others else []
    head = ["streams", "bare tok/s", "daemon tok/s", "daemon / bare (quartiles)", *against, "pairs"]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for streams, samples in found.items():
        ratios = [spread([sample.daemon / sample.bare for sample in samples])]
        if others:
            ratios.append(spread([s.daemon / other for s, other in zip(samples, others[streams], strict=True)]))
        bare, daemon = statistics.median(s.bare for s in samples), statistics.median(s.daemon for s in samples)
        lines.append(f"| {streams} | {bare:.0f} | {daemon:.0f} | {' | '.join(ratios)} | {len(samples)} |")
    lines += ["", "Processor time, µs a token:", ""]
    roles = list(next(iter(found.values()))[0].cpu)
    lines.append("| streams | " + " | ".join(roles) + " | all but executor and client |")
    lines.append("|---" * (len(roles) + 2) + "|")
    for streams, samples in found.items():
        cpu = {role: statistics.median(sample.cpu[role] for sample in samples) for role in roles}
        rest = sum(value for role, value in cpu.items() if role not in ("executor", "client"))
        lines.append(f"| {streams} | " + " | ".join(f"{value:.0f}" for value in cpu.values()) + f" | {rest:.0f} |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
