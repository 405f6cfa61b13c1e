"""What guesses save: `python -m tests.bench.speculation`.

A replica in one process (scheduler, KV-manager and executor, no sockets) answers the same greedy requests with a
drafter and without, in turns, so that what else the machine does falls on both; policy `adaptive`, answers compared. A
cell gives the median of the pairs' ratios of time, without to with: above 1 guessing was faster. Requests of a cell
differ in a number only; as in a service, `suffix` has all earlier answers to look at, `ngram` a request's own text.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, SpeculationConfig
from octavo.core.messages import Enqueue
from octavo.core.models.locate import locate
from octavo.core.plugins import resolve
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.executors.base import Executor
from tests.speculation.replica import Replica, asked

RESULTS = Path(__file__).parents[1] / "results" / "speculation.md"
CODE = """class Counter:
    def __init__(self, start):
        self.value = start

    def increase(self, amount):
        self.value = self.value + amount
        return self.value

    def decrease(self, amount):
        self.value = self.value - amount
        return self.value
"""
PASSAGE = (
    "The lighthouse was built in 1871 by the harbour company. Its lamp can be seen from thirty kilometres away. "
    "In 1923 the old oil lamp was replaced by an electric one. The last keeper left the tower in 1968, and since then "
    "it has been run from the mainland. Visitors may climb its two hundred and twelve steps on Sundays."
)
PERSON = '  {"name": "Ada", "age": 36, "city": "London", "country": "UK"},\n  {"name": "Bob",'
WORKLOADS = {
    "code edit": (f"Rename `value` to `total` in this code:\n{CODE}", "```python\nclass Counter:"),
    "JSON": ("Write a list of ten people as JSON, each with name, age, city and country.", f"[\n{PERSON}"),
    "quotes": (f"Repeat this text word by word: {PASSAGE}", "The lighthouse was built"),
    "chat": ("Tell me about a day at the sea.", ""),
}
"""What is asked, and how the answer begins."""
DRAFTERS = ("ngram", "suffix")


class Row(NamedTuple):
    ratios: list[float]
    drafted: int
    accepted: int
    tokens: int


def loaded(kind: str, mode: str, drafter: str | None) -> Executor:
    config = Config(
        kv=KvConfig(tokens=16384),
        executor=ExecutorConfig(kind=kind, mode=mode, threads=1),  # type: ignore[arg-type]
        speculation=SpeculationConfig(drafter=drafter),
    )
    executor: Executor = resolve("octavo.executor", kind).load(config)
    return executor


def answered(executor: Executor, requests: list[Enqueue], policy: str) -> tuple[float, Replica]:
    replica = Replica(executor, policy=policy, slots=32, depth=1, budget=512, clock=time.monotonic_ns)
    started = time.perf_counter()
    replica.run(requests)
    return time.perf_counter() - started, replica


def measured(plain: Executor, guessing: Executor, prompts: list[list[int]], tokens: int, pairs: int) -> Row:
    requests = [asked(i, prompt, tokens=tokens) for i, prompt in enumerate(prompts)]
    ratios, drafted, accepted, said = [], 0, 0, 0
    for _ in range(pairs):
        without, one = answered(plain, requests, "off")
        with_, other = answered(guessing, requests, "adaptive")
        assert one.said == other.said, "a guess changed an answer"
        ratios.append(without / with_)
        drafted += other.drafted
        accepted += other.accepted
        said += sum(map(len, other.said.values()))
    return Row(ratios, drafted, accepted, said)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--executor", default="native")
    parser.add_argument("--mode", default="exact")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    vocabulary = load_vocabulary(locate("default"))
    plain = loaded(given.executor, given.mode, None)
    about = (
        f"SmolLM2-135M-Instruct, one compute thread, {given.tokens} tokens an answer, {given.pairs} pairs a cell; load "
        f"of the machine {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores. With more load than cores, steps' times "
        "say little, also to `adaptive`; tokens a step do not depend on them so much."
    )
    lines = [
        f"# Speculation on the executor {given.executor} ({given.mode})",
        "",
        *(__doc__ or "").splitlines(),
        "",
        about,
        "",
        "| drafter | workload | concurrency | ratio (least, most) | guesses right | tokens a step |",
        "|---|---|---|---|---|---|",
    ]
    for drafter in DRAFTERS:
        guessing = loaded(given.executor, given.mode, drafter)
        for name, (question, begins) in WORKLOADS.items():
            for n in given.concurrency:
                turns = (
                    f"<|im_start|>user\n{i}. {question}<|im_end|>\n<|im_start|>assistant\n{begins}" for i in range(n)
                )
                row = measured(plain, guessing, [vocabulary.encode(t) for t in turns], given.tokens, given.pairs)
                right = f"{row.accepted / row.drafted:.0%}" if row.drafted else "–"
                ratio = f"{statistics.median(row.ratios):.2f}× ({min(row.ratios):.2f}, {max(row.ratios):.2f})"
                lines.append(
                    f"| {drafter} | {name} | {n} | {ratio} | {right} | {row.tokens / (row.tokens - row.accepted):.2f} |"
                )
                print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
