"""The cores under random interleavings, preemption, forks, cancels, drafts and crashes: nothing lost or wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tests.fuzz.campaign import MUST_HAPPEN
from tests.fuzz.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("core", "policies", "executors", "kernels", "plugins")
MUTANT_RUNS = 400
"""Most runs given to a mutant; nearly all are caught within twenty."""


def run_campaign(
    first: int, count: int, timeout_s: float, *, overlay: Path | None = None, shrink: bool = True
) -> dict[str, Any]:
    """A campaign in a process of its own, so that an overlay can stand in for the installed cores."""
    path = [str(p) for p in (overlay, ROOT) if p is not None]
    environ = {"PYTHONPATH": os.pathsep.join(path), "FUZZ_SHRINK": str(int(shrink))}
    command = [sys.executable, "-m", "tests.fuzz.campaign", str(first), str(count)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=os.environ | environ, check=False
    )
    assert not done.returncode, done.stderr  # the campaign itself is broken: neither a finding nor a catch
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.timeout(1500)
def test_no_interleaving_breaks_the_promise(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    runs = int(pytestconfig.getoption("fuzz_runs"))
    first = int(pytestconfig.getoption("fuzz_seed"))
    parts = os.cpu_count() or 1
    share = -(-runs // parts)
    with ThreadPoolExecutor(parts) as pool:
        futures = [pool.submit(run_campaign, first + i * share, share, 60 + 2.0 * share) for i in range(parts)]
        results = [f.result() for f in futures]
    for result in results:
        assert not result["failed"], result["failed"]
    seen: Counter[str] = Counter()
    for result in results:
        seen += Counter(result["seen"])
    reads = sum(result["reads"] for result in results)
    with capsys.disabled():
        print(f"\nfuzz: {parts * share} runs from seed {first}, {reads} cell reads verified")
        for event in MUST_HAPPEN:
            print(f"  {seen[event]:7} {event}")
    never = [event for event in MUST_HAPPEN if not seen[event]]
    assert not never, f"these never happened, so nothing was shown about them: {never}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name.replace(" ", "-") for m in MUTANTS])
def test_a_single_line_fault_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    overlay = tmp_path / "octavo"
    copytree(ROOT / "core" / "_root", overlay)
    for package in PACKAGES:  # with what is compiled already: only the faulty file is compiled anew
        copytree(ROOT / package, overlay / package, ignore=lambda _, names: {"_root"} & set(names))
    target = overlay / mutant.file
    source = target.read_text()
    assert source.count(mutant.line) == 1, f"{mutant.file} has the line {source.count(mutant.line)} times"
    target.write_text(source.replace(mutant.line, mutant.fault))
    result = run_campaign(0, MUTANT_RUNS, 600, overlay=tmp_path, shrink=False)
    assert result["failed"], f"not caught in {MUTANT_RUNS} runs"
