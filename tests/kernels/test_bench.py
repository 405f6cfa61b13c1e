"""What a first session on a GPU runs does run: in small, on the emulator. What is measured here means nothing."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

from octavo.executors.cuda.emulated import again
from octavo.kernels.cuda.instances import COPY_BLOCKS, SPEC_VERIFY
from tests.bench.cuda_kernels import PARTS, TINY, Bench
from tests.bench.cuda_report import BENCH, PAGE, RESULTS, TARGETS, TESTS, load, page, save
from tests.kernels import gpu
from tests.kernels.conftest import Maker, compiled_ahead

HERE = {"gpu": "a GPU", "driver": "1.0", "torch": "2.0", "date": "2026-11-30"}


def test_every_target_is_measured(resident_kernels: Maker) -> None:
    bench = Bench(resident_kernels(1), TINY, again)
    assert tuple(bench.parts) == PARTS
    with torch.inference_mode():
        for part in bench.parts.values():
            part()
    assert bench.found.keys() == TARGETS.keys()
    assert all(value > 0 for value in bench.found.values())


def test_parts_that_are_run_one_by_one_make_one_page(tmp_path: Path) -> None:
    save(tmp_path, BENCH, HERE, {"decode_large": 0.93, "sample": 0.2})
    save(tmp_path, BENCH, HERE, {"prefill_mma": 0.31})
    save(tmp_path, TESTS, HERE, {"primitives": {"passed": 9, "failed": 0, "skipped": 1, "ended": "well"}})
    told = (tmp_path / PAGE).read_text("utf-8")
    assert "| decode, bf16 KV of 1 GiB | 0.93 | ≥ 0.90 of copy | yes |" in told
    assert "| logits to tokens, top-k and top-p | 0.2 ms | ≤ 0.15 ms | no: `sample.cu`" in told
    assert "| prefill by mma.sync, causal | 0.31 | ≥ 0.45 of GEMM | no: `attn_prefill.cu`" in told
    assert told.count("not measured") == len(TARGETS) - 3
    assert "| 9 | 0 | 1 | well |" in told
    save(tmp_path, BENCH, HERE | {"gpu": "another"}, {"sample": 0.1})
    assert load(tmp_path / BENCH)["found"] == {"sample": 0.1}, "figures of two machines are not one result"


def test_the_page_is_of_what_was_found() -> None:
    assert (RESULTS / PAGE).read_text("utf-8") == page(load(RESULTS / TESTS), load(RESULTS / BENCH))


def test_a_stage_that_there_is_no_time_for_keeps_what_was_found(tmp_path: Path) -> None:
    was = {"kernels": {"passed": 9, "failed": 0, "skipped": 1, "ended": "well"}}
    save(tmp_path, TESTS, HERE, was)
    assert gpu.stages(["kernels", "executor"], time.monotonic(), tmp_path, HERE) == 1
    assert load(tmp_path / TESTS)["found"] == was


def test_a_stage_ends_by_the_clock_with_all_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute-sanitizer runs another process. Left behind it would hold the other end of this pipe, and a GPU."""
    ear, mouth = os.pipe()
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: popen(*words, **more, pass_fds=(mouth,)))
    monkeypatch.setattr(gpu, "command", lambda *_: ["sh", "-c", "sleep 300 & wait"])
    assert gpu.stage("memcheck", 0.5) == {"passed": 0, "failed": 0, "skipped": 0, "ended": gpu.BY_CLOCK}
    os.close(mouth)
    assert select.select([ear], [], [], 20)[0], "somebody has the other end"
    assert os.read(ear, 1) == b""
    os.close(ear)


def test_plugins_are_found_where_octavo_is_not_installed(tmp_path: Path) -> None:
    """As on a machine with a GPU and no `.venv`: by a Python that sees no installation."""
    gpu.written_down(tmp_path)
    words = (
        "import importlib.metadata as m; print(m.version('octavo'), *m.distribution('octavo').entry_points, sep='|')"
    )
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    run = subprocess.run([sys.executable, "-S", "-c", words], env=env, capture_output=True, text=True, timeout=60)
    version, *found = run.stdout.strip().split("|")
    here = [str(point) for point in metadata.distribution("octavo").entry_points if point.group != "console_scripts"]
    assert version == metadata.version("octavo")
    assert sorted(found) == sorted(here)
    assert len(found) > 20


def test_kernels_are_compiled_before_a_gpu_waits_for_them() -> None:
    """All that can be; what cannot is left to the test that asks for it."""
    assert compiled_ahead("sm_90a", [COPY_BLOCKS, COPY_BLOCKS._replace(name="no_such_kernel"), SPEC_VERIFY]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("module", ["tests.kernels.gpu", "tests.bench.cuda_kernels"])
def test_without_a_gpu_they_say_so_and_write_nothing(module: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-m", module, "--out", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # as ./dev runs them
    run = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "finds no GPU" in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())
