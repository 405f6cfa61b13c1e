"""What a first session on a GPU runs: `./dev gpu-test`, that is `python -m tests.kernels.gpu`.

Primitives first, device against emulator: when they fail nothing else is run. Then the kernels' and the executor's
tests on the device; then, where compute-sanitizer is installed, the small cases under it. A run ends after `--minutes`:
each stage's result is written when it ends, beside those of earlier runs on the same GPU, so the stages can be run one
by one; what was found of a stage stays when there is no time to begin it. Installs nothing: it says what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from octavo.kernels.cuda.nvrtc import NvrtcError, nvrtc
from tests.bench.cuda_report import STAGES, TESTS, arguments, machine, save

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "primitives": ("test_device.py",),
    "kernels": (
        "test_attention.py", "test_cascade.py", "test_latent.py", "test_plan.py", "test_pool.py", "test_rows.py",
        "test_verify.py",
    ),
    "executor": ("test_executor.py", "test_engine.py"),
}  # fmt: skip
SMALL = "test_plan.py or test_pool.py or sinks"
SANITIZERS = ("memcheck", "racecheck", "synccheck")
ENDED = {0: "well", 1: "with failures", 5: "without tests", 9: "with faults"}
BY_CLOCK = "by the clock"
NEEDED = (
    "torch", "cupy", "pytest", "pytest_timeout", "msgspec", "zmq", "anyio", "structlog", "gguf",
    "transformers", "tokenizers", "safetensors",
)  # fmt: skip


def missing(parts: Sequence[str] = ()) -> list[str]:
    """What has to be there and is not, in words."""
    found = [f"the module {name}" for name in NEEDED if not _there(name)]
    try:
        nvrtc()
    except NvrtcError as error:
        found.append(f"NVRTC ({error})")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        found.append("g++, for the emulator that the device is compared with")
    if sanitizer() is None and set(parts) & set(SANITIZERS):
        found.append("compute-sanitizer, of the CUDA toolkit")
    return found


def main() -> int:
    args = arguments("gpu-test", __doc__, tuple(STAGES))
    if _there("torch"):
        import torch

        if not torch.cuda.is_available():
            print(f"octavo: torch {torch.__version__} finds no GPU here, so nothing is tested", file=sys.stderr)
            return 1
    if lacking := missing(args.parts):
        print(
            f"octavo: not here: {'; '.join(lacking)}. Modules come with a .venv that ./dev setup makes on this machine",
            file=sys.stderr,
        )
        return 2
    names = args.parts or [name for name in STAGES if name not in SANITIZERS or sanitizer()]
    return stages(names, time.monotonic() + 60 * args.minutes, args.out, machine())


def stages(names: Sequence[str], until: float, out: Path, about: Mapping[str, str]) -> int:
    """Run them, and write to `out` what each found."""
    failed = False
    for name in names:
        if (left := until - time.monotonic()) <= 0:
            print(f"octavo: no time for {name} and what follows it; ./dev gpu-test {name} …", file=sys.stderr)
            return 1
        one = stage(name, left)
        save(out, TESTS, about, {name: one})
        print(f"{name}: {one['passed']} passed, {one['failed']} failed, {one['skipped']} skipped; ended {one['ended']}")
        failed |= one["ended"] != ENDED[0]
        if failed and name == "primitives":
            print("octavo: all else rests on the primitives; nothing else is run before they pass", file=sys.stderr)
            break
    return int(failed)


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer")


def command(name: str, report: Path) -> list[str]:
    under = []
    words = [] if name == "primitives" else ["--kernels-on-gpu"]
    if name in SANITIZERS:
        tool = sanitizer() or "compute-sanitizer"
        under = [tool, "--tool", name, "--error-exitcode", "9", "--target-processes", "all"]
        words += ["-k", SMALL]
    elif name == "executor":
        words += ["-k", "not processes"]
    paths = [f"tests/kernels/{file}" for file in FILES.get(name, FILES["kernels"])]
    return [*under, sys.executable, "-m", "pytest", *words, *paths, "-q", f"--junitxml={report}"]


def stage(name: str, seconds: float) -> dict[str, object]:
    """Run it, for so long at most."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        process = subprocess.Popen(
            command(name, report), cwd=ROOT, env=environment(Path(folder)), start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {**counted(report), "ended": BY_CLOCK}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what compute-sanitizer runs: it would keep the GPU
                process.wait()
        return {**counted(report), "ended": ENDED.get(code, f"with exit status {code}")}


def environment(folder: Path) -> dict[str, str]:
    """For a stage's tests. Where Octavo is not installed its plugins are found by what `folder` has of it."""
    env = {**os.environ, "PYTHONSAFEPATH": "1"}  # else transformers would take our folder kernels/ for a package
    try:
        metadata.distribution("octavo")
    except metadata.PackageNotFoundError:
        written_down(folder)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return env


def written_down(folder: Path) -> None:
    """What an installation writes down of Octavo's name and plugins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / f"octavo-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: octavo\nVersion: {project['version']}\n", "utf-8")
    lines = []
    for group, plugins in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in plugins.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), "utf-8")


def counted(report: Path) -> dict[str, int]:
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            counts = {key: counts[key] + int(suite.get(key, "0")) for key in counts}
    failed = counts["failures"] + counts["errors"]
    return {"passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"]}


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


if __name__ == "__main__":
    sys.exit(main())
