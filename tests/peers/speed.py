"""Octavo and its peers side by side: through HTTP, on the same weights, by the same client.

    python -m tests.peers.speed --models DIR --venvs DIR --llama DIR [--peers NAME …] [--rounds N] [--wrap COMMAND]

One server runs at a time. In each round every peer has a turn right after one of Octavo's with the same requests, so a
ratio is of neighbours in time. What was measured is kept in `--data` (one JSON file) after each turn, and a run goes on
where the last one ended; `--wrap` is put before the command of each turn, to have the machine alone for instance. Each
turn takes less than four minutes. Writes tests/results/peers_speed.md; `--render` does only that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.peers.load import Call, together
from tests.peers.servers import NAMES, Places, running, server
from tests.peers.workloads import MORE_IS_BETTER, WORKLOADS, ids

RESULT = Path(__file__).resolve().parents[1] / "results" / "peers_speed.md"
OURS = NAMES[0]

TURN_S = 150.0
"""A turn begins no further workload after this time; the next turn goes on there."""

Record = dict[str, Any]
"""One workload of one turn: `server`, `beside` (the peer that it is compared with), `round`, `workload`, `load` of the
machine before, and `figures`, or `error`."""


def turn(name: str, beside: str, number: int, places: Places, workloads: list[str]) -> Iterator[Record]:
    """Start the server, warm it up, run workloads for as long as a turn takes."""
    head: Record = {"server": name, "beside": beside, "round": number, "load": os.getloadavg()[0]}
    begun = time.monotonic()
    try:
        with running(server(name, places)) as port:
            asyncio.run(together(port, [Call(ids(10_000 + number, i, 300), 16) for i in range(8)], 8))
            for i, workload in enumerate(workloads):
                if i and time.monotonic() - begun > TURN_S:
                    return
                yield {**head, "workload": workload, **_measured(workload, port, number)}
    except RuntimeError as error:
        for workload in workloads:
            yield {**head, "workload": workload, "figures": {}, "error": f"it does not start: {str(error)[-500:]}"}


def _measured(workload: str, port: int, seed: int) -> Record:
    try:
        mine = seed * len(WORKLOADS) + list(WORKLOADS).index(workload)  # prompts of its own: none is cached before
        return {"figures": asyncio.run(WORKLOADS[workload](port, mine))}
    except ExceptionGroup as errors:
        return {"figures": {}, "error": repr(errors.exceptions[0])[:500]}
    except (RuntimeError, TimeoutError, OSError) as error:
        return {"figures": {}, "error": repr(error)[:500]}


def turns(peers: list[str], rounds: int) -> Iterator[tuple[str, str, int]]:
    for number in range(1, rounds + 1):
        for peer in peers:
            yield OURS, peer, number
            yield peer, peer, number


def versions(places: Places) -> dict[str, str]:
    """Of everybody, as the programs themselves say."""
    found = {OURS: metadata.version("octavo")}
    asks = {
        "llama.cpp": [str(places.llama / "llama-server"), "--version"],
        "vLLM": _version(places.venvs / "vllm", "vllm"),
        "OpenVINO": _version(places.venvs / "openvino", "openvino-genai"),
        "transformers": _version(places.venvs / "vllm", "transformers"),
    }
    for name, command in asks.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            continue
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        if done.returncode == 0 and lines:
            found[name] = next((line for line in lines if line.startswith("version")), lines[-1])
    return found


def _version(venv: Path, package: str) -> list[str]:
    code = f"from importlib import metadata; print(metadata.version({package!r}))"
    return [str(venv / "bin" / "python"), "-c", code]


def machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def report(data: dict[str, Any]) -> str:
    assert __doc__ is not None
    taken: list[Record] = data["turns"]
    lines = ["# Speed beside peers", "", *__doc__.strip().splitlines()[:1], "", __doc__.strip().split("\n\n", 2)[2], ""]
    lines += [
        data["machine"] + ".",
        "",
        "; ".join(f"{name}: {words}" for name, words in data["versions"].items()) + ".",
    ]
    lines += ["", f"Load of the machine before a turn: {_spread([one['load'] for one in taken])}.", ""]
    peers = list(dict.fromkeys(one["server"] for one in taken if one["server"] != OURS))
    for workload in WORKLOADS:
        lines += [f"## {workload}", ""]
        names = dict.fromkeys(f for one in taken if one["workload"] == workload for f in one["figures"])
        for figure in names:
            lines += _table(taken, peers, workload, figure)
    failed = {(one["server"], f"{one['workload']}: {one['error'].splitlines()[-1]}") for one in taken if "error" in one}
    if failed:
        lines += ["## What did not work", ""] + [f"- {name}, {why}" for name, why in sorted(failed)]
    return "\n".join(lines) + "\n"


def _table(taken: list[Record], peers: list[str], workload: str, figure: str) -> list[str]:
    better = "more" if figure in MORE_IS_BETTER else "less"
    lines = [
        f"| {figure} ({better} is better) | median (least to most) | Octavo / it, by turns | turns |",
        "|---|---|---|---|",
    ]
    values = [one for one in taken if one["workload"] == workload and figure in one["figures"]]
    ours = {(one["beside"], one["round"]): one["figures"][figure] for one in values if one["server"] == OURS}
    for name in [OURS, *peers]:
        mine = [one for one in values if one["server"] == name]
        if not mine:
            continue
        pairs = [
            ours[name, one["round"]] / one["figures"][figure]
            for one in mine
            if (name, one["round"]) in ours and one["figures"][figure]
        ]
        ratio = _spread(pairs) if name != OURS and pairs else ""
        spread = _spread([one["figures"][figure] for one in mine])
        lines.append(f"| {name} | {spread} | {ratio} | {len(mine)} |")
    return [*lines, ""]


def _spread(values: list[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:.3g}" if len(values) < 2 else f"{middle:.3g} ({min(values):.3g} to {max(values):.3g})"


def _keep(path: Path, record: Record) -> None:
    data = load(path)
    data["turns"].append(record)
    path.write_text(json.dumps(data, indent=1))


def _missing(path: Path, name: str, beside: str, number: int, workloads: list[str]) -> list[str]:
    known = {(one["server"], one["beside"], one["round"], one["workload"]) for one in load(path)["turns"]}
    return [workload for workload in workloads if (name, beside, number, workload) not in known]


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"turns": []}
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", type=Path, required=True, help="what tests.peers.prepare made")
    options.add_argument("--venvs", type=Path, required=True, help="with vllm/ and openvino/")
    options.add_argument("--llama", type=Path, required=True, help="the folder of llama-server")
    options.add_argument("--peers", nargs="+", default=list(NAMES[1:]), choices=NAMES[1:])
    options.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--data", type=Path, default=Path("peers_speed.json"))
    options.add_argument("--wrap", default="", help="put before the command of each turn")
    options.add_argument("--render", action="store_true")
    options.add_argument("--turn", nargs=3, metavar=("SERVER", "BESIDE", "ROUND"), help="only this one")
    given = options.parse_args()
    places = Places(given.models.resolve(), given.venvs.resolve(), given.llama.resolve())
    if given.turn is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is not left behind
        name, beside, number = given.turn
        for record in turn(name, beside, int(number), places, given.workloads):
            _keep(given.data, record)
            print(json.dumps(record), flush=True)
        return
    if not given.render:
        for name, beside, number in turns(given.peers, given.rounds):
            while missing := _missing(given.data, name, beside, number, given.workloads):
                command = [*shlex.split(given.wrap), sys.executable, "-m", "tests.peers.speed", *_again(given)]
                command += ["--workloads", *missing, "--turn", name, beside, str(number)]
                started = time.monotonic()
                subprocess.run(command, check=False)
                if _missing(given.data, name, beside, number, given.workloads) == missing:
                    head = {"server": name, "beside": beside, "round": number, "load": os.getloadavg()[0]}
                    lost = {"workload": missing[0], "figures": {}, "error": "nothing came of it in the time of a turn"}
                    _keep(given.data, head | lost)
                print(f"{name}, round {number}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    data = load(given.data) | {"machine": machine(), "versions": versions(places)}
    given.data.write_text(json.dumps(data, indent=1))
    text = report(data)
    RESULT.write_text(text)
    print(text)


def _again(given: argparse.Namespace) -> list[str]:
    where = ["--models", str(given.models), "--venvs", str(given.venvs), "--llama", str(given.llama)]
    return [*where, "--data", str(given.data)]


if __name__ == "__main__":
    main()
