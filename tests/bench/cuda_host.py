"""What a decode step costs the CUDA executor's host: `python -m tests.bench.cuda_host`.

The production executor takes bound steps of decodes, one ahead of the other, from plan to result; only its decoder and
its kernels do nothing, so no GPU is needed. What is left is what the host does beside launching: the rows of a step,
its batch in the buffers of a recorded graph, its draws, and the settling of the step before. The same sequences decode
again and again, as they mostly do, and take a block every 16 tokens. `told` is a crowd in which every 16th sequence
wants log-probabilities and every 16th has penalties. A row gives the least and the median of many steps; the machine's
other work only adds. With `--before ROOT`, a checkout of an earlier state with an environment of its own, both take
turns, and the last column is this one's part of that one's least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec.structs import fields as fields_of

from octavo.core.messages import EMPTY, Facts, Kind, Open, Sampling, StepBind, StepPlan, col
from octavo.executors.cuda.decoder import SAID
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.lora import Adapting
from octavo.kernels.cuda.launch import Staged

M = TypeVar("M", StepPlan, StepBind)
RESULT = Path(__file__).resolve().parents[1] / "results" / "cuda_host.md"
BLOCK, VOCABULARY, STEPS, ROUNDS = 16, 1024, 120, 3
CASES = ((1, 1024, "drawn"), (32, 1024, "drawn"), (256, 1024, "drawn"), (256, 4096, "drawn"), (256, 1024, "told"))


class NoKernels:
    """Everybody says 1."""

    device, blocks = torch.device("cpu"), 264

    def room(self, n: int, *_: object) -> Staged:
        works, merges, out, lse = torch.zeros(4, n, 8, dtype=torch.int32)
        return Staged(works, merges, out, lse, 16)

    def plan(self, *_: object, **__: object) -> None: ...

    def scores(self, logits: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return logits

    def sample(self, scores: torch.Tensor, _: object) -> torch.Tensor:
        return torch.ones(len(scores), dtype=torch.int32)


def no_decoder() -> Any:
    spec = SimpleNamespace(layers=1, kv_heads=8, hidden=64, vocab_size=VOCABULARY, latent=None, context=8192)
    return SimpleNamespace(
        kernels=NoKernels(), spec=spec, dtype=torch.bfloat16, block_size=BLOCK, group=4, windows=[0], rows=(16, 64),
        exact=False, recordable=True, adapting=Adapting(), mixed=128, pools=[torch.zeros(1, 16, dtype=torch.uint8)],
        saturated=torch.zeros(1, dtype=torch.int32),
        said=torch.zeros(SAID, dtype=torch.int64), hidden=lambda ids, *_, **__: torch.zeros(len(ids), 64),
        logits=lambda x: torch.zeros(len(x), VOCABULARY),
    )  # fmt: skip


def sampling(i: int, crowd: str) -> Sampling:
    if crowd == "told" and i % 16 == 3:
        return Sampling(temperature=0.7, seed=i, logprobs=2)
    if crowd == "told" and i % 16 == 5:
        return Sampling(temperature=0.7, seed=i, repetition=1.1)
    return Sampling(temperature=0.7, top_p=0.9, seed=i)


def message(kind: type[M], /, **fields: Any) -> M:
    """With empty columns for what is not given and has to be."""
    return kind(**{field.name: EMPTY for field in fields_of(kind) if field.required} | fields)


def measured(sequences: int, context: int, crowd: str) -> list[float]:
    """Microseconds of each step."""
    facts = Facts(
        model_id="", context=2 * context, vocab_size=VOCABULARY, block_size=BLOCK, total_blocks=1 << 20,
        block_bytes=1, cache_seed=b"",
    )  # fmt: skip
    executor = CudaExecutor(Forward(no_decoder(), lambda _: lambda: None), facts)
    n, each = sequences, range(sequences)
    lengths = max(1, context - STEPS - BLOCK) + np.arange(n) % BLOCK  # each comes to the end of a block in another step
    blocks = -(-lengths // BLOCK)
    opens = [Open(i, i, col([1] * lengths[i]), int(lengths[i]), 0, 0, sampling(i, crowd), b"") for i in each]
    kinds, ones = col([int(Kind.DECODE)] * n), col([1] * n)
    same = {"scheduler_gen": 0, "now_ns": 0, "forks": [], "taken": 0, "failed": []}
    decodes = {"slot": col(each), "open_id": col(each), "kind": kinds, "n": ones}
    plan = message(StepPlan, step=0, opens=opens, start_or_cap=col(lengths), **same, **decodes)
    bind = message(
        StepBind, kv_gen=0, step=0, opened_slot=col(each), opened_open_id=col(each), opened_group=col([0] * n),
        opened_len=col(lengths - 1), opened_n=col(blocks), opened_blocks=col(range(blocks.sum())),
    )  # fmt: skip
    executor.begin(plan, bind)
    took = []
    for step in range(1, STEPS):
        lengths += 1
        due = np.flatnonzero(lengths % BLOCK == 1)
        plan = message(StepPlan, step=step, opens=[], start_or_cap=col(lengths), **same, **decodes)
        bind = message(
            StepBind, kv_gen=0, step=step, delta_slot=col(due), delta_group=col([0] * len(due)),
            delta_index=col(lengths[due] // BLOCK), delta_block=col([7] * len(due)),
        )  # fmt: skip
        started = time.perf_counter_ns()
        told = executor.begin(plan, bind)
        took.append((time.perf_counter_ns() - started) / 1000)
        assert [len(result.slot) for result in told] == [n]
    return took[STEPS // 4 :]


def here() -> list[list[float]]:
    torch.set_num_threads(1)
    return [measured(*case) for case in CASES]


def of(root: Path) -> list[list[float]]:
    """The same in another process, of the checkout `root`."""
    command = [str(root / ".venv/bin/python"), __file__, "--json"]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=300).stdout
    steps: list[list[float]] = json.loads(out)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, metavar="ROOT", help="a checkout to compare with")
    parser.add_argument("--json", action="store_true", help="print each step's microseconds and write nothing")
    args = parser.parse_args()
    if args.json:
        json.dump(here(), sys.stdout)
        return
    now: list[list[float]] = [[] for _ in CASES]
    before: list[list[float]] = [[] for _ in CASES]
    for _ in range(ROUNDS):
        for root, steps in ((args.before, before), (Path(__file__).resolve().parents[2], now)):
            if root is not None:
                for all_steps, more in zip(steps, of(root), strict=True):
                    all_steps += more
    lines = [
        "| sequences | context | crowd | least µs | median µs | part of before |",
        "|--:|--:|--|--:|--:|--:|",
    ]
    for (n, context, crowd), mine, theirs in zip(CASES, now, before, strict=True):
        part = f"{min(mine) / min(theirs):.2f} of {min(theirs):.0f}" if theirs else "–"
        lines.append(f"| {n} | {context} | {crowd} | {min(mine):.0f} | {median(mine):.0f} | {part} |")
    table = "\n".join(lines)
    print(table)
    load = f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors."
    RESULT.write_text(f"# The CUDA executor's host, per decode step\n\n{__doc__}\n{load}\n\n{table}\n", "utf-8")


if __name__ == "__main__":
    main()
