"""What guesses save: `python -m tests.bench.speculation`, or some cells of it (`--drafter`, `--workload`,
`--concurrency`); the others stay as they were measured before.

A replica in one process (scheduler, KV-manager and executor, no sockets) answers the same greedy requests with a
drafter and without, in turns, so that what else the machine does falls on both; policy `adaptive`, which learns anew in
each run, answers compared. A cell gives the median of the pairs' ratios of time, without to with: above 1 guessing was
faster. Requests of a pair differ from those of all others; as in a service, `suffix` has all earlier answers of its
cell to look at, `ngram` a request's own text.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, SpeculationConfig
from octavo.core.messages import Enqueue
from octavo.core.models.locate import locate
from octavo.core.plugins import resolve
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.executors.base import Executor
from tests.bench.repetitive import WORKLOADS
from tests.speculation.replica import Replica, asked

RESULTS = Path(__file__).parents[1] / "results" / "speculation.md"
DRAFTERS = ("ngram", "suffix")
CONCURRENCIES = (1, 8, 32)


class Cell(msgspec.Struct, frozen=True):
    """`ratios` of pairs; guesses verified and right, tokens of answers, and the machine's load as it began."""

    ratios: list[float]
    drafted: int
    accepted: int
    tokens: int
    load: float


def loaded(kind: str, mode: str, threads: int, drafter: str | None) -> Executor:
    config = Config(
        kv=KvConfig(tokens=16384),
        executor=ExecutorConfig(kind=kind, mode=mode, threads=threads),  # type: ignore[arg-type]
        speculation=SpeculationConfig(drafter=drafter),
    )
    executor: Executor = resolve("octavo.executor", kind).load(config)
    return executor


def answered(executor: Executor, requests: list[Enqueue], policy: str) -> tuple[float, Replica]:
    replica = Replica(executor, policy=policy, slots=32, depth=1, budget=512, clock=time.monotonic_ns)
    started = time.perf_counter()
    replica.run(requests)
    return time.perf_counter() - started, replica


def measured(
    plain: Executor, guessing: Executor, requests: Callable[[int], list[Enqueue]], pairs: int, within_s: float
) -> Cell:
    """At least 3 pairs, then more up to `pairs` while there is time."""
    load, ratios, drafted, accepted, said = os.getloadavg()[0], [], 0, 0, 0
    until = time.monotonic() + within_s
    for pair in range(pairs):
        if pair >= 3 and time.monotonic() > until:
            break
        asking, runs = requests(pair), {}
        for policy in ("off", "adaptive") if pair % 2 else ("adaptive", "off"):
            runs[policy] = answered(plain if policy == "off" else guessing, asking, policy)
        (without, one), (with_, other) = runs["off"], runs["adaptive"]
        assert one.said == other.said, "a guess changed an answer"
        ratios.append(without / with_)
        drafted += other.drafted
        accepted += other.accepted
        said += sum(map(len, other.said.values()))
    return Cell(ratios, drafted, accepted, said, load)


def rendered(cells: dict[str, Cell], how: str) -> str:
    lines = [
        "# What speculation saves",
        "",
        *(__doc__ or "").splitlines(),
        "",
        f"{how} With other work on the machine, steps' times say little, also to `adaptive`.",
        "",
        "| drafter | workload | concurrency | ratio (quartiles) | pairs | guesses right | tokens a step | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in sorted(cells.items(), key=_place):
        low, middle, high = statistics.quantiles(cell.ratios, n=4, method="inclusive")
        right = f"{cell.accepted / cell.drafted:.0%}" if cell.drafted else "–"
        a_step = cell.tokens / (cell.tokens - cell.accepted)
        lines.append(
            f"| {' | '.join(name.split('/'))} | {middle:.2f}× ({low:.2f}, {high:.2f}) | {len(cell.ratios)} | {right} | "
            f"{a_step:.2f} | {cell.load:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _place(item: tuple[str, Cell]) -> tuple[int, int, int]:
    drafter, workload, n = item[0].split("/")
    return DRAFTERS.index(drafter), list(WORKLOADS).index(workload), int(n)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafter", nargs="+", default=DRAFTERS, choices=DRAFTERS)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--executor", default="native")
    parser.add_argument("--mode", default="fast")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--cell-seconds", type=float, default=8.0)
    given = parser.parse_args()
    how = (
        f"Executor {given.executor} ({given.mode}), SmolLM2-135M-Instruct, compute threads: {given.threads}, "
        f"{given.tokens} tokens an answer, on {os.cpu_count()} cores."
    )
    store = RESULTS.with_suffix(".json")
    before = msgspec.json.decode(store.read_bytes(), type=dict[str, dict[str, Cell]]) if store.exists() else {}
    cells = before.get(how, {})  # measured otherwise, they are of another table
    vocabulary = load_vocabulary(locate("default"))
    plain = loaded(given.executor, given.mode, given.threads, None)
    for drafter in given.drafter:
        for workload in given.workload:
            for n in given.concurrency:
                guessing = loaded(given.executor, given.mode, given.threads, drafter)

                def requests(pair: int, workload: str = workload, n: int = n) -> list[Enqueue]:
                    texts = (WORKLOADS[workload](pair * n + i) for i in range(n))
                    return [asked(i, vocabulary.encode(text), tokens=given.tokens) for i, text in enumerate(texts)]

                for executor, policy in ((plain, "off"), (guessing, "off")):
                    answered(executor, requests(-1), policy)  # so that all memory is there
                cells[f"{drafter}/{workload}/{n}"] = measured(
                    plain, guessing, requests, given.pairs, given.cell_seconds
                )
                store.write_bytes(msgspec.json.format(msgspec.json.encode({how: cells}), indent=1) + b"\n")
                RESULTS.write_text(rendered(cells, how), encoding="utf-8")
                print(rendered({f"{drafter}/{workload}/{n}": cells[f"{drafter}/{workload}/{n}"]}, "").splitlines()[-1])


if __name__ == "__main__":
    main()
