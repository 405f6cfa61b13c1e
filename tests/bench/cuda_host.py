"""What a decode step costs the CUDA executor's host before the device can start: `python -m tests.bench.cuda_host`.

No GPU is needed: only NumPy and Python are measured. The same sequences decode again and again, as they mostly do; a
row gives the least of many steps, since what else the machine does only adds.
"""

from __future__ import annotations

import argparse
import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from octavo.core.messages import Sampling
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.drawing import Drawer, Row
from octavo.executors.residents import Resident, Run, span_of

RESULT = Path(__file__).resolve().parents[1] / "results" / "cuda_host.md"
BLOCK, VOCABULARY, TIMES = 16, 128_000, 300


def least_us(work: Callable[[], object]) -> float:
    took = []
    for _ in range(TIMES):
        started = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - started)
    return min(took) / 1000


def measured(sequences: int, context: int) -> tuple[float, float, float]:
    """Microseconds for the spans, the batch and the draws."""
    blocks = context // BLOCK
    residents = [
        Resident(
            i, [1] * (context - 3), 10, 0, Sampling(temperature=0.7, top_p=0.9, seed=i), context - 4, 0,
            array("i", range(i * blocks, (i + 1) * blocks)),
        )
        for i in range(sequences)
    ]  # fmt: skip
    runs = [Run(i, r, len(r.tokens) - 1, len(r.tokens), True, 0, context) for i, r in enumerate(residents)]
    spans = [span_of(run, ()) for run in runs]
    drawer, rows = Drawer(VOCABULARY), [Row(resident) for resident in residents]
    return (
        least_us(lambda: [span_of(run, ()) for run in runs]),
        least_us(lambda: build(spans, BLOCK)),
        least_us(lambda: drawer.drawing(rows)),
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = ["| sequences | context | spans µs | batch µs | draws µs | sum µs |", "|--:|--:|--:|--:|--:|--:|"]
    for sequences, context in ((1, 1024), (32, 1024), (256, 1024), (256, 4096)):
        parts = measured(sequences, context)
        figures = " | ".join(f"{part:.0f}" for part in (*parts, sum(parts)))
        lines.append(f"| {sequences} | {context} | {figures} |")
    table = "\n".join(lines)
    print(table)
    load = f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors."
    RESULT.write_text(f"# The CUDA executor's host, per decode step\n\n{__doc__}\n{load}\n\n{table}\n", "utf-8")


if __name__ == "__main__":
    main()
