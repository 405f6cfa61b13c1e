"""What a row of logits costs in the step library beside the sampler: rows a millisecond, in interleaved pairs.

    python -m tests.bench.sampling [--pairs 9] [--rows 32]

Logits are the default model's, of an English text. Writes tests/results/sampling.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.messages import Sampling
from octavo.executors.native.drawing import Drawing, Draws, Reported
from octavo.executors.native.teacher import Teacher
from octavo.executors.residents import Resident
from octavo.executors.sampling import Context, logprob, sample
from tests.native.net import levels
from tests.native.test_drawing import Bare
from tests.native.test_model import TEXT, encode

RESULTS = Path(__file__).parents[1] / "results" / "sampling.md"
VOCABULARY = 49152
CASES: dict[str, dict[str, Any]] = {
    "temperature 0.7": {},
    "temperature 0.7, top-p 0.95": {"top_p": 0.95},
    "temperature 1, top-p 0.999": {"temperature": 1.0, "top_p": 0.999},
    "temperature 0.7, top-k 40": {"top_k": 40},
    "temperature 0.7, min-p 0.05": {"min_p": 0.05},
    "top-k 40, top-p 0.9, repetition 1.1 over 1 000 tokens": {"top_k": 40, "top_p": 0.9, "repetition": 1.1},
    "greedy, frequency 0.5, 20 biases": {"temperature": 0.0, "frequency": 0.5, "bias": dict.fromkeys(range(20), 1.0)},
}


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(first: Callable[[], object], second: Callable[[], object], pairs: int) -> tuple[float, float, list[float]]:
    """Median seconds of each, and the ratios pair by pair."""
    taken = [(timed(first), timed(second)) for _ in range(pairs + 1)][1:]
    firsts, seconds = zip(*taken, strict=True)
    return statistics.median(firsts), statistics.median(seconds), [a / b for a, b in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rows", type=int, default=32)
    asked = parser.parse_args()
    logits = Teacher("default", "file", "bf16", exact=False)(encode(TEXT)[:256])[-asked.rows :]
    ids = np.random.default_rng(0).integers(0, VOCABULARY, size=1000).tolist()
    ours = Drawing(Bare(VOCABULARY, levels()[-1]))  # type: ignore[arg-type]
    lines = []
    for name, options in CASES.items():
        sampling = Sampling(**({"temperature": 0.7, "seed": 5} | options))
        residents = [Resident(i, ids, 500, 0, sampling) for i in range(asked.rows)]
        context = Context(sampling, 0, 500, ids)
        before, after, ratios = compare(
            lambda context=context: [sample(row, context) for row in logits],  # type: ignore[misc]
            lambda residents=residents: ours.draw(list(map(Draws, residents, logits[:, None]))),  # type: ignore[misc]
            asked.pairs,
        )
        lines.append(_line(name, asked.rows, before, after, ratios))
    before, after, ratios = compare(
        lambda: [logprob(row, 7, 5) for row in logits],
        lambda: ours.likely([Reported(row, 7, 5) for row in logits]),
        asked.pairs,
    )
    lines.append(_line("log-probabilities, 5 alternatives", asked.rows, before, after, ratios))
    text = (
        "# Sampling in the step library\n\n"
        f"`python -m tests.bench.sampling`: {asked.rows} rows of the default model's {VOCABULARY} logits "
        f"on one thread; {asked.pairs} "
        "interleaved pairs, medians, ratios from the least to the greatest.\n\n"
        "| asked | numpy, rows/ms | library, rows/ms | ratio |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    RESULTS.write_text(text)
    print(text)


def _line(name: str, rows: int, before: float, after: float, ratios: list[float]) -> str:
    middle = statistics.median(ratios)
    spread = f"{middle:.0f} ({min(ratios):.0f}-{max(ratios):.0f})"
    return f"| {name} | {rows / before / 1000:.2f} | {rows / after / 1000:.1f} | {spread} |"


if __name__ == "__main__":
    main()
