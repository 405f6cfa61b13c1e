"""What a first session on a GPU runs: `./dev gpu-test`, that is `python tests/kernels/gpu.py`.

Primitives first, device against emulator; then the kernels' and the executor's tests on the device; then, where
compute-sanitizer is installed, the small cases under it. Prints a table and writes tests/results/cuda_tests.json with
the GPU, its driver and the date.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "tests" / "results" / "cuda_tests.json"
PRIMITIVES = ("test_device.py",)
KERNELS = (
    "test_attention.py",
    "test_cascade.py",
    "test_latent.py",
    "test_plan.py",
    "test_pool.py",
    "test_rows.py",
    "test_verify.py",
)
EXECUTOR = ("test_executor.py", "test_engine.py")
SMALL = "test_plan.py or test_pool.py or sinks"


def main() -> int:
    if not torch.cuda.is_available():
        print("octavo: torch finds no GPU here, so there is nothing to test on", file=sys.stderr)
        return 1
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    date = subprocess.run(["date", "-I"], capture_output=True, text=True, check=True).stdout.strip()
    stages = [
        stage("primitives", PRIMITIVES, ["-m", "pytest"]),
        stage("kernels", KERNELS, ["-m", "pytest", "--kernels-on-gpu"]),
        stage("executor", EXECUTOR, ["-m", "pytest", "--kernels-on-gpu", "-k", "not processes"]),
    ]
    if tool := shutil.which("compute-sanitizer"):
        for kind in ("memcheck", "racecheck", "synccheck"):
            under = [tool, "--tool", kind, "--error-exitcode", "9", "--target-processes", "all"]
            stages.append(stage(kind, KERNELS, ["-m", "pytest", "--kernels-on-gpu", "-k", SMALL], under))
    print("\n| stage | passed | failed | skipped | exit |\n|---|--:|--:|--:|--:|")
    for one in stages:
        print(f"| {one['stage']} | {one['passed']} | {one['failed']} | {one['skipped']} | {one['exit']} |")
    about = {"gpu": gpu, "driver": driver, "date": date, "torch": str(torch.__version__), "stages": stages}
    RESULT.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return int(any(one["exit"] for one in stages))


def stage(name: str, files: tuple[str, ...], words: list[str], under: list[str] | None = None) -> dict[str, object]:
    report = ROOT / "tests" / "results" / ".junit.xml"
    paths = [f"tests/kernels/{file}" for file in files]
    command = [*(under or ()), sys.executable, *words, *paths, "-q", f"--junitxml={report}"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            counts = {key: counts[key] + int(suite.get(key, "0")) for key in counts}
        report.unlink()
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return {"stage": name, "passed": passed, "failed": failed, "skipped": counts["skipped"], "exit": code}


if __name__ == "__main__":
    sys.exit(main())
