"""Results of runs over everything, in tests/results/."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "results"


def write(name: str, lines: list[str]) -> None:
    (FOLDER / name).write_text(
        "Written by `pytest tests/kernels --kernels-all`.\n\n" + "\n".join(lines) + "\n", "utf-8"
    )
