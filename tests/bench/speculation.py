"""What guesses save: `python -m tests.bench.speculation`, or some cells of it (`--drafter`, `--workload`,
`--concurrency`); the others stay as they were measured before.

A replica in one process (scheduler, KV-manager and executor, no sockets) answers the same greedy requests with a
drafter and without, in turns, so that what else the machine does falls on both; policy `adaptive`, which learns anew in
each run, answers compared. A cell gives the median of the pairs' ratios of time, without to with: above 1 guessing was
faster; of the decoding alone (steps that compute no prompt) and of the whole, prompt included, which guesses cannot
make shorter. An answer ends where the model ends it, or at the length of the right answer. Requests of a pair differ
from those of all others; as in a service, `suffix` has all earlier answers of its cell to look at, `ngram` a request's
own text.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, SpeculationConfig
from octavo.core.messages import Enqueue, Kind
from octavo.core.models.locate import locate
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.executors.base import Executor
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.threads import default_threads
from tests.bench.repetitive import WORKLOADS
from tests.speculation.replica import Replica, asked

RESULTS = Path(__file__).parents[1] / "results" / "speculation.md"
DRAFTERS = ("ngram", "suffix")
CONCURRENCIES = (1, 8, 32)


class Cell(msgspec.Struct, frozen=True):
    """Ratios of pairs, of the whole and of `decoding`; guesses verified and right, tokens of answers, and the machine's
    load as it began."""

    ratios: list[float]
    decoding: list[float]
    drafted: int
    accepted: int
    tokens: int
    load: float


def loaded(mode: str, threads: int, drafter: str) -> tuple[NativeExecutor, NativeExecutor]:
    """Without and with the drafter, around one model: where its weights lie is the same for both."""
    config = Config(
        kv=KvConfig(tokens=16384),
        executor=ExecutorConfig(kind="native", mode=mode, threads=threads),  # type: ignore[arg-type]
        speculation=SpeculationConfig(drafter=drafter),
    )
    guessing = NativeExecutor.load(config)
    return NativeExecutor(guessing.model, guessing.facts), guessing


class Spent(NamedTuple):
    """Seconds in all, and in steps that compute no prompt (with what lies between steps)."""

    whole: float
    decoding: float


def answered(executor: Executor, requests: list[Enqueue], policy: str) -> tuple[Spent, Replica]:
    replica = Replica(executor, policy=policy, slots=32, depth=1, budget=512, clock=time.monotonic_ns)
    started = time.perf_counter()
    replica.run(requests)
    whole = time.perf_counter() - started
    prompts = (r for plan, r in zip(replica.plans, replica.results, strict=True) if (plan.kind == Kind.CHUNK).any())
    return Spent(whole, whole - sum(r.finished_ns - r.started_ns for r in prompts) / 1e9), replica


def measured(
    plain: Executor, guessing: Executor, requests: Callable[[int], list[Enqueue]], pairs: int, within_s: float
) -> Cell:
    """At least 2 pairs, then more up to `pairs` while there is time."""
    load, ratios, decoding, drafted, accepted, said = os.getloadavg()[0], [], [], 0, 0, 0
    until = time.monotonic() + within_s
    for pair in range(pairs):
        if pair >= 2 and time.monotonic() > until:
            break
        asking, runs = requests(pair), {}
        for policy in ("off", "adaptive") if pair % 2 else ("adaptive", "off"):
            runs[policy] = answered(plain if policy == "off" else guessing, asking, policy)
        (without, one), (with_, other) = runs["off"], runs["adaptive"]
        assert one.said == other.said, "a guess changed an answer"
        ratios.append(without.whole / with_.whole)
        decoding.append(without.decoding / with_.decoding)
        drafted += other.drafted
        accepted += other.accepted
        said += sum(map(len, other.said.values()))
    return Cell(ratios, decoding, drafted, accepted, said, load)


def rendered(cells: dict[str, Cell], how: str) -> str:
    lines = [
        "# What speculation saves",
        "",
        *(__doc__ or "").splitlines(),
        "",
        f"{how} With other work on the machine, steps' times say little, also to `adaptive`.",
        "",
        "| drafter | workload | concurrency | decoding (quartiles) | whole | pairs | right | tokens a step | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in sorted(cells.items(), key=_place):
        low, middle, high = statistics.quantiles(cell.decoding, n=4, method="inclusive")
        right = f"{cell.accepted / cell.drafted:.0%}" if cell.drafted else "–"
        a_step = cell.tokens / (cell.tokens - cell.accepted)
        lines.append(
            f"| {' | '.join(name.split('/'))} | {middle:.2f}× ({low:.2f}, {high:.2f}) | "
            f"{statistics.median(cell.ratios):.2f}× | {len(cell.ratios)} | {right} | "
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
    parser.add_argument("--mode", default="fast")
    parser.add_argument("--threads", type=int, default=default_threads(), help="as many as a daemon takes, if not said")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--chat-tokens", type=int, default=160, help="of an answer that repeats nothing, at most")
    parser.add_argument("--cell-seconds", type=float, default=8.0)
    given = parser.parse_args()
    how = (
        f"Executor native ({given.mode}), SmolLM2-135M-Instruct, compute threads: {given.threads}, "
        f"on {os.cpu_count()} cores."
    )
    store = RESULTS.with_suffix(".json")
    before = msgspec.json.decode(store.read_bytes(), type=dict[str, dict[str, Cell]]) if store.exists() else {}
    cells = before.get(how, {})  # measured otherwise, they are of another table
    vocabulary = load_vocabulary(locate("default"))
    stops = sorted(vocabulary.eos_ids)
    for drafter in given.drafter:
        for workload in given.workload:
            for n in given.concurrency:
                plain, guessing = loaded(given.mode, given.threads, drafter)

                def requests(pair: int, workload: str = workload, n: int = n) -> list[Enqueue]:
                    tasks = [WORKLOADS[workload](pair * n + i) for i in range(n)]
                    most = [len(vocabulary.encode(task.answer, False)) or given.chat_tokens for task in tasks]
                    return [
                        replace(asked(i, vocabulary.encode(task.prompt), tokens=tokens), stop_ids=stops)
                        for i, (task, tokens) in enumerate(zip(tasks, most, strict=True))
                    ]

                for executor in (plain, guessing):
                    answered(executor, requests(-1)[:1], "off")  # so that all memory is there
                cells[f"{drafter}/{workload}/{n}"] = measured(
                    plain, guessing, requests, given.pairs, given.cell_seconds
                )
                store.write_bytes(msgspec.json.format(msgspec.json.encode({how: cells}), indent=1) + b"\n")
                RESULTS.write_text(rendered(cells, how), encoding="utf-8")
                print(rendered({f"{drafter}/{workload}/{n}": cells[f"{drafter}/{workload}/{n}"]}, "").splitlines()[-1])


if __name__ == "__main__":
    main()
