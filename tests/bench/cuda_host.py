"""What a decode step costs the CUDA executor's host: `python -m tests.bench.cuda_host`.

No GPU is needed: only NumPy and Python are measured. The same sequences decode again and again, as they mostly do; a
row gives the least of many steps, since what else the machine does only adds. Spans, batch and draws come before the
device can start a step. The frame (with the spans) goes around the pass, and what was said is settled at the end.
"""

from __future__ import annotations

import argparse
import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from octavo.core.messages import Sampling
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.drawing import Drawer, Row
from octavo.executors.drafting.contract import NO_DRAFT
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.frame import Asked, Frame
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Resident, Run, Span, span_of

RESULT = Path(__file__).resolve().parents[1] / "results" / "cuda_host.md"
BLOCK, VOCABULARY, TIMES = 16, 128_000, 300


def least_us(work: Callable[[], object]) -> float:
    took = []
    for _ in range(TIMES):
        started = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - started)
    return min(took) / 1000


class NoDevice:
    """Passes that cost nothing: everybody says 1."""

    def begin(self, spans: list[Span], asked: list[Asked]) -> list[bool]:
        return [True] * len(spans)

    def finite(self, made: list[bool]) -> list[bool]:
        return made

    def say(self, made: list[bool], heard: list[Asked]) -> list[Outcome]:
        return [Outcome(None, (1,), (None,)) for _ in heard]

    def prompt(self, *_: object) -> NoReturn:
        raise AssertionError("nobody asks")

    straighten = states = prompt


def measured(sequences: int, context: int) -> tuple[float, ...]:
    """Microseconds for the spans, the batch, the draws, the frame, and to settle."""
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
    settlement, drafting = Settlement(VOCABULARY), Drafting(None, VOCABULARY)
    frame: Frame[list[bool]] = Frame(NoDevice(), settlement, drafting)
    drafts, unknown = [NO_DRAFT] * sequences, [-1] * sequences
    outcomes = [Outcome(None, (1,), (None,))] * sequences

    def settle() -> None:
        settlement.expect(runs, unknown)
        settlement.result(0, 0, runs, outcomes)
        for resident in residents:
            resident.tokens.pop()

    return (
        least_us(lambda: [span_of(run, ()) for run in runs]),
        least_us(lambda: build(spans, BLOCK)),
        least_us(lambda: drawer.drawing(rows)),
        least_us(lambda: frame.end(frame.begin(runs, drafts), [])),
        least_us(settle),
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = [
        "| sequences | context | spans µs | batch µs | draws µs | frame µs | settle µs | sum µs |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for sequences, context in ((1, 1024), (32, 1024), (256, 1024), (256, 4096)):
        parts = measured(sequences, context)
        figures = " | ".join(f"{part:.0f}" for part in (*parts, sum(parts[1:])))
        lines.append(f"| {sequences} | {context} | {figures} |")
    table = "\n".join(lines)
    print(table)
    load = f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors."
    RESULT.write_text(f"# The CUDA executor's host, per decode step\n\n{__doc__}\n{load}\n\n{table}\n", "utf-8")


if __name__ == "__main__":
    main()
