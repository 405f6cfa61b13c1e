"""Octavo and its peers side by side: through HTTP, on the same weights, by the same client.

    python -m tests.peers.speed --models DIR --venvs DIR --llama DIR [--peers NAME …] [--rounds N] [--wrap COMMAND]

In a *turn* Octavo and one peer are both up, and take every workload one right after the other with the same requests;
who is first changes from round to round and from pair to pair. So a ratio is of neighbours in time, seconds apart. The
peer is stopped while Octavo is asked (some poll); an Octavo is not, since its processes watch each other: what it takes
of a core while nobody asks is told. What was measured is kept in `--data` (one JSON file) after each workload, and a
run goes on where the last one ended; `--wrap` is put before the command of each turn, to have the machine alone for
instance. A turn takes less than four minutes. Writes tests/results/peers_speed.md; `--render` does only that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.peers.load import Call, together
from tests.peers.report import OURS, Record, machine, report, versions
from tests.peers.servers import NAMES, OTHERWISE, PORT, Places, Running, running, server
from tests.peers.workloads import PAIRS, WORKLOADS, ids

RESULT = Path(__file__).resolve().parents[1] / "results" / "peers_speed.md"

IDLE_S = 2.0
TURN_S = 215.0
"""Whatever is not done by then is left to the next turn."""
LEAST_S = 25.0
"""A turn begins no further workload with less time left."""


def turn(peer: str, number: int, places: Places, workloads: list[str]) -> Iterator[Record]:
    """Start both, warm them up, run workloads for as long as a turn takes."""
    until = time.monotonic() + TURN_S
    head: Record = {"peer": peer, "round": number, "load": os.getloadavg()[0]}
    try:
        own = server(OTHERWISE.get(peer, OURS), places, PORT)
        with running(own) as ours, running(server(peer, places, PORT + 1)) as theirs:
            both = {OURS: ours, peer: theirs}
            for one in both.values():
                asyncio.run(together(one.port, [Call(ids(10_000 + number, i, 300), 16) for i in range(8)], 8))
            head["idle"] = _idle(both)
            for i, workload in enumerate(workloads):
                if i and until - time.monotonic() < LEAST_S:
                    return
                record = {**head, "workload": workload, **_pairs(both, workload, number, until)}
                if i and record["errors"] and time.monotonic() > until - 1:
                    return  # it had but the rest of a turn
                yield record
    except (RuntimeError, ExceptionGroup) as error:
        why = f"the two do not start or warm up: {str(error)[-500:]}"
        for workload in workloads:
            yield {**head, "idle": {}, "workload": workload, "pairs": [], "errors": {peer: why}}


def _pairs(both: dict[str, Running], workload: str, number: int, until: float) -> Record:
    pairs: list[dict[str, dict[str, float]]] = []
    for i in range(PAIRS.get(workload, 1)):
        order = list(both) if (number + i) % 2 else list(reversed(both))
        seed = (number * 100 + i) * len(WORKLOADS) + list(WORKLOADS).index(workload)  # none is in a cache before
        pair: dict[str, dict[str, float]] = {}
        for name in order:
            ((peer, theirs),) = ((other, one) for other, one in both.items() if other != OURS)
            try:
                with theirs.stopped() if name == OURS and not peer.startswith(OURS) else nullcontext():
                    pair[name] = asyncio.run(_within(workload, both[name].port, seed, until))
            except (RuntimeError, TimeoutError, OSError, ExceptionGroup) as error:
                first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                return {"pairs": pairs, "errors": {name: repr(first)[:500]}}
        pairs.append(pair)
    return {"pairs": pairs, "errors": {}}


async def _within(workload: str, port: int, seed: int, until: float) -> dict[str, float]:
    async with asyncio.timeout(max(1.0, until - time.monotonic())):
        return await WORKLOADS[workload](port, seed)


def _idle(both: dict[str, Running]) -> dict[str, float]:
    """What each takes of a core while nobody asks."""
    before = {name: one.cpu_s() for name, one in both.items()}
    time.sleep(IDLE_S)
    return {name: (one.cpu_s() - before[name]) / IDLE_S for name, one in both.items()}


def _keep(path: Path, record: Record) -> None:
    data = load(path)
    data["turns"].append(record)
    path.write_text(json.dumps(data, indent=1))


def _missing(path: Path, peer: str, number: int, workloads: list[str]) -> list[str]:
    known = {(one["peer"], one["round"], one["workload"]) for one in load(path)["turns"]}
    return [workload for workload in workloads if (peer, number, workload) not in known]


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
    options.add_argument("--turn", nargs=2, metavar=("PEER", "ROUND"), help="only this one")
    given = options.parse_args()
    places = Places(given.models.resolve(), given.venvs.resolve(), given.llama.resolve())
    if given.turn is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are not left behind
        peer, number = given.turn
        for record in turn(peer, int(number), places, given.workloads):
            _keep(given.data, record)
            print(json.dumps(record), flush=True)
        return
    if not given.render:
        for number in range(1, given.rounds + 1):
            for peer in given.peers:
                _turns(given, peer, number)
    data = load(given.data) | {"machine": machine(), "versions": versions(places)}
    given.data.write_text(json.dumps(data, indent=1))
    assert __doc__ is not None
    text = report(data, __doc__)
    RESULT.write_text(text)
    print(text)


def _turns(given: argparse.Namespace, peer: str, number: int) -> None:
    """As many as a peer's round takes."""
    while missing := _missing(given.data, peer, number, given.workloads):
        where = ["--models", given.models, "--venvs", given.venvs, "--llama", given.llama, "--data", given.data]
        command = [*shlex.split(given.wrap), sys.executable, "-m", "tests.peers.speed", *map(str, where)]
        command += ["--workloads", *missing, "--turn", peer, str(number)]
        started = time.monotonic()
        subprocess.run(command, check=False)
        if _missing(given.data, peer, number, given.workloads) == missing:
            head = {"peer": peer, "round": number, "load": os.getloadavg()[0], "idle": {}, "workload": missing[0]}
            _keep(given.data, head | {"pairs": [], "errors": {peer: "nothing came of it in the time of a turn"}})
        took = time.monotonic() - started
        print(f"{peer}, round {number}: {took:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
