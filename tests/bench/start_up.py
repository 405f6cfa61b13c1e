"""From a cold `octavo serve` to its first token, and what its processes hold: `python tests/bench/start_up.py`.

The default model, the executors of --kinds in turns, so that what else the machine does falls on all of them. Time
runs from the start of the command to the first piece of text that a client got, which asks until it is served. Right
after that answer are read the processor time of all processes so far, and their memory: resident (RSS) and
proportional (PSS: pages that processes share count once), in MB.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
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

from octavo.core.rundir import read
from octavo.core.supervisor.status import ask

PATIENCE_S = 300.0
RESULTS = Path(__file__).parents[1] / "results" / "start_up.md"
BODY = json.dumps({"prompt": "The sky is", "max_tokens": 4, "temperature": 0, "stream": True})


class Use(NamedTuple):
    """Of one process: memory in MB, processor time in seconds."""

    resident: float
    proportional: float
    cpu: float


class Sample(NamedTuple):
    """Of one start; `uses` by process."""

    seconds: float
    uses: dict[str, Use]

    @property
    def total(self) -> Use:
        return Use(*(sum(values) for values in zip(*self.uses.values(), strict=True)))


@contextlib.contextmanager
def serving(*sets: str) -> Iterator[Path]:
    """A daemon on a free port; its run folder."""
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder:
        run = Path(folder) / "run"
        words = [f"run_dir={run}", "server.port=0", *sets]
        log = (Path(folder) / "log").open("wb")
        command = [sys.executable, "-m", "octavo", "serve", *(w for word in words for w in ("--set", word))]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            yield run
        except BaseException:
            sys.stderr.write((Path(folder) / "log").read_text())
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            log.close()


def first_token(run: Path) -> None:
    """Returns when a client has text."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            info = read(run)
            if info is not None and info.address is not None and not info.address.endswith(":0"):
                host = info.address.removeprefix("http://")
                connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
                connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status == 200 and response.readline().startswith(b"data: {"):
                    response.read()
                    connection.close()
                    return
                connection.close()
        time.sleep(0.01)
    raise TimeoutError(f"no token within {PATIENCE_S:.0f} s")


def uses(run: Path) -> dict[str, Use]:
    info = read(run)
    assert info is not None
    status = ask(info)
    assert status is not None
    pids = {"supervisor": info.pid} | {actor.role: actor.pid for actor in status.actors if actor.pid is not None}
    found: dict[str, Use] = {}
    for role, pid in pids.items():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines if line.endswith("kB")}
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        found[role] = Use(values["Rss"], values["Pss"], cpu)
    return found


def measure(kind: str) -> Sample:
    started = time.monotonic()
    executor, _, grammar = kind.partition("+")
    with serving(f"executor.kind={executor}", *([f"executor.grammar={grammar}"] if grammar else [])) as run:
        first_token(run)
        return Sample(time.monotonic() - started, uses(run))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=["native", "native+xgrammar", "cpu"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"to {RESULTS.name}")
    arguments = parser.parse_args()
    samples: dict[str, list[Sample]] = {kind: [] for kind in arguments.kinds}
    for _ in range(arguments.pairs):
        for kind in arguments.kinds:
            samples[kind].append(measure(kind))
    text = report(samples)
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


def report(samples: dict[str, list[Sample]]) -> str:
    assert __doc__ is not None
    first, *others = samples
    lines = ["# Start-up", "", __doc__.strip(), "", f"Load of the machine {os.getloadavg()[0]:.1f}.", ""]
    lines.append("| executor | first token, s (quartiles) | processor, s | resident, MB | proportional, MB | starts |")
    lines.append("|---" * 6 + "|")
    for kind, found in samples.items():
        times = [sample.seconds for sample in found]
        low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        rss, pss, cpu = (statistics.median(sample.total[i] for sample in found) for i in range(3))
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {kind} | {spread} | {cpu:.1f} | {rss:.0f} | {pss:.0f} | {len(found)} |")
    for kind in others:
        pairs = zip(samples[kind], samples[first], strict=True)
        ratio = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        lines.append(f"\nMedian of the pairs' ratios, {kind} to {first}: {ratio:.2f}.")
    lines += [
        "",
        "| process | " + " | ".join(f"{kind}: processor s, resident / proportional MB" for kind in samples) + " |",
    ]
    lines.append("|---" * (len(samples) + 1) + "|")
    for role in samples[first][0].uses:
        cells = []
        for found in samples.values():
            rss, pss, cpu = (statistics.median(s.uses[role][i] for s in found) for i in range(3))
            cells.append(f"{cpu:.2f}, {rss:.0f} / {pss:.0f}")
        lines.append(f"| {role} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
