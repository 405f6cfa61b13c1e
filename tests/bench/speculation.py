"""What guesses save: `python -m tests.bench.speculation`, or some cells of it (`--drafter`, `--workload`,
`--concurrency`); the others stay as they were measured before. Heads are those of `examples/train_heads.py FOLDER`
(`--heads FOLDER`), trained in minutes; `draft-model` is the target itself, for want of a smaller one with its
vocabulary: never wrong, and as slow as it; `self` is the first half of a model that was not made for it.

Two replicas in one process (scheduler, KV-manager and executor each, no sockets) answer the same greedy requests, one
with a drafter and policy `adaptive`, which learns anew in each run, one without; step by step, whoever is less far goes
on, so that what else the machine does falls on both. Answers are compared. A cell gives the median of the pairs' ratios
of time, without to with: above 1 guessing was faster; of the decoding alone (steps that compute no prompt) and of the
whole, prompt included, which guesses cannot make shorter. An answer ends where the model ends it, or at the length of
the right answer. Requests of a pair differ from those of all others; as in a service, `suffix` has all earlier answers
of its cell to look at, `ngram` a request's own text. The time of each side is its own in full: what its scheduler,
policy, drafter and executor take. The last column says whether the policy and the drafter were what they were when this
table was written, or those before.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, SpeculationConfig
from octavo.core.messages import Enqueue, Kind
from octavo.core.models.locate import locate
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.executors.base import Executor
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.native.program import Native, Pool
from octavo.executors.threads import default_threads
from tests.bench.repetitive import WORKLOADS
from tests.speculation.replica import Replica, asked

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results" / "speculation.md"
DRAFTERS: dict[str, tuple[str, dict[str, str]]] = {
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "draft-model": ("draft_model", {"model": "default"}),
    "self": ("early_exit", {}),
    "medusa": ("medusa", {"heads": "medusa"}),
    "eagle": ("eagle", {"head": "eagle3"}),
}
"""By name: the module, and options; heads are below a folder."""
CONCURRENCIES = (1, 8, 32)
_COLUMNS = (
    "drafter",
    "workload",
    "concurrency",
    "decoding (quartiles)",
    "whole",
    "pairs",
    "right",
    "tokens a step",
    "load",
    "code",
)


class Cell(msgspec.Struct, frozen=True):
    """Ratios of pairs, of the whole and of `decoding`; guesses verified and right, tokens of answers, and the machine's
    load as it began; what was measured, see `code`."""

    ratios: list[float]
    decoding: list[float]
    drafted: int
    accepted: int
    tokens: int
    load: float
    code: str = ""


def code(drafter: str) -> str:
    """A digest of what decides how many guesses are made, and which."""
    policy, drafting = ROOT / "policies" / "speculation", ROOT / "executors" / "drafting"
    parts = (
        policy / "adaptive.py",
        policy / "costs.py",
        *(drafting / f"{name}.py" for name in (DRAFTERS[drafter][0], "trust")),
    )
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:12]


def loaded(mode: str, threads: int, drafter: str, heads: Path) -> tuple[NativeExecutor, NativeExecutor]:
    """Without and with the drafter: the same weights, a pool each."""
    told = DRAFTERS[drafter][1].items()
    options = {name: str(heads / value) if name.startswith("head") else value for name, value in told}
    config = Config(
        kv=KvConfig(tokens=16384),
        executor=ExecutorConfig(kind="native", mode=mode, threads=threads),  # type: ignore[arg-type]
        speculation=SpeculationConfig(drafter=drafter, options=options),
    )
    guessing = NativeExecutor.load(config)
    model, facts = guessing.model, guessing.facts
    pool = Pool(facts.places, facts.block_size, model.pool.kind)
    return NativeExecutor(Native(model.weights, pool, model.threads, model.isa), facts), guessing


class Side:
    """One of the two that answer: seconds in all, and in steps that compute no prompt (with what lies between them).
    Its clock stands while the other one goes on: a step's time, as its policy sees it, is its own."""

    def __init__(self, executor: Executor, requests: list[Enqueue], policy: str) -> None:
        self.replica = Replica(executor, policy=policy, slots=32, depth=1, budget=512, clock=self._now_ns)
        self.replica.submit(requests)
        self.whole = self.decoding = 0.0
        self._began = 0.0
        self.progress = 0
        """Tokens of prompts computed and of answers said."""

    def step(self) -> bool:
        """Go on up to a step's result; False if there is none to come."""
        replica, before, self._began = self.replica, len(self.replica.results), time.perf_counter()
        while (moved := replica.advance()) and len(replica.results) == before:
            pass
        spent = time.perf_counter() - self._began
        self.whole += spent
        self.decoding += spent
        if moved:
            plan, result = replica.plans[before], replica.results[before]
            prompts = int(plan.n[plan.kind == Kind.CHUNK].sum())
            self.progress += prompts + int(result.n_new.sum())
            if prompts:
                self.decoding -= (result.finished_ns - result.started_ns) / 1e9
        return moved

    def _now_ns(self) -> int:
        """While it goes on."""
        return int((self.whole + time.perf_counter() - self._began) * 1e9)


def side_by_side(first: Side, other: Side) -> None:
    """Step by step, whoever is less far goes on."""
    going = [first, other]
    while going:
        one = min(going, key=lambda side: side.progress)
        if not one.step():
            going.remove(one)


def measured(
    plain: Executor,
    guessing: Executor,
    requests: Callable[[int], list[Enqueue]],
    pairs: int,
    within_s: float,
    of: str,
) -> Cell:
    """At least 2 pairs, then more up to `pairs` while there is time; `of` the `code` that it is."""
    load, ratios, decoding, drafted, accepted, said = os.getloadavg()[0], [], [], 0, 0, 0
    until = time.monotonic() + within_s
    for pair in range(pairs):
        if pair >= 2 and time.monotonic() > until:
            break
        without, with_ = Side(plain, requests(pair), "off"), Side(guessing, requests(pair), "adaptive")
        side_by_side(*((without, with_) if pair % 2 else (with_, without)))
        assert without.replica.said == with_.replica.said, "a guess changed an answer"
        ratios.append(without.whole / with_.whole)
        decoding.append(without.decoding / with_.decoding)
        drafted += with_.replica.drafted
        accepted += with_.replica.accepted
        said += sum(map(len, with_.replica.said.values()))
    return Cell(ratios, decoding, drafted, accepted, said, load, of)


def rendered(cells: dict[str, Cell], how: str) -> str:
    lines = [
        "# What speculation saves",
        "",
        *(__doc__ or "").splitlines(),
        "",
        f"{how} With other work on the machine, steps' times say little, also to `adaptive`.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for name, cell in sorted(cells.items(), key=_place):
        low, middle, high = statistics.quantiles(cell.decoding, n=4, method="inclusive")
        right = f"{cell.accepted / cell.drafted:.0%}" if cell.drafted else "–"
        a_step = cell.tokens / (cell.tokens - cell.accepted)
        lines.append(
            f"| {' | '.join(name.split('/'))} | {middle:.2f}× ({low:.2f}, {high:.2f}) | "
            f"{statistics.median(cell.ratios):.2f}× | {len(cell.ratios)} | {right} | "
            f"{a_step:.2f} | {cell.load:.1f} | {'as it is' if cell.code == code(name.split('/')[0]) else 'before'} |"
        )
    return "\n".join(lines) + "\n"


def _place(item: tuple[str, Cell]) -> tuple[int, int, int]:
    drafter, workload, n = item[0].split("/")
    return list(DRAFTERS).index(drafter), list(WORKLOADS).index(workload), int(n)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafter", nargs="+", default=["ngram", "suffix"], choices=list(DRAFTERS))
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--mode", default="fast")
    parser.add_argument("--threads", type=int, default=default_threads(), help="as many as a daemon takes, if not said")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--chat-tokens", type=int, default=160, help="of an answer that repeats nothing, at most")
    parser.add_argument("--cell-seconds", type=float, default=8.0)
    parser.add_argument("--heads", type=Path, default=Path("heads"), help="where medusa and eagle3 are")
    given = parser.parse_args()
    how = (
        f"Executor native ({given.mode}), SmolLM2-135M-Instruct, compute threads: {given.threads}, "
        f"on {os.cpu_count()} cores, both sides step by step."
    )
    store = RESULTS.with_suffix(".json")
    before = msgspec.json.decode(store.read_bytes(), type=dict[str, dict[str, Cell]]) if store.exists() else {}
    cells = before.get(how, {})  # measured otherwise, they are of another table
    vocabulary = load_vocabulary(locate("default"))
    stops = sorted(vocabulary.eos_ids)
    for drafter in given.drafter:
        for workload in given.workload:
            for n in given.concurrency:
                plain, guessing = loaded(given.mode, given.threads, drafter, given.heads)

                def requests(pair: int, workload: str = workload, n: int = n) -> list[Enqueue]:
                    tasks = [WORKLOADS[workload](pair * n + i) for i in range(n)]
                    most = [len(vocabulary.encode(task.answer, False)) or given.chat_tokens for task in tasks]
                    return [
                        replace(asked(i, vocabulary.encode(task.prompt), tokens=tokens), stop_ids=stops)
                        for i, (task, tokens) in enumerate(zip(tasks, most, strict=True))
                    ]

                for executor in (plain, guessing):
                    Replica(executor, policy="off").run(requests(-1)[:1])  # so that all memory is there
                gc.freeze()  # as actors do
                cells[f"{drafter}/{workload}/{n}"] = measured(
                    plain, guessing, requests, given.pairs, given.cell_seconds, code(drafter)
                )
                store.write_bytes(msgspec.json.format(msgspec.json.encode({how: cells}), indent=1) + b"\n")
                RESULTS.write_text(rendered(cells, how), encoding="utf-8")
                print(rendered({f"{drafter}/{workload}/{n}": cells[f"{drafter}/{workload}/{n}"]}, "").splitlines()[-1])


if __name__ == "__main__":
    main()
