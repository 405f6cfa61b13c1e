"""The servers that are measured side by side: how each is started, and what it says of itself. README.md says how to
get each. All serve the same weights, on all cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.peers.prepare import NAME

HOST, PORT = "127.0.0.1", 18200
READY_S = 200.0
SHIM = Path(__file__).with_name("shim.py")
CONTEXT = 8192


class Places(NamedTuple):
    """What was made: `models` by `prepare`, `venvs` with vllm/ and openvino/, `llama` with llama-server."""

    models: Path
    venvs: Path
    llama: Path


class Server(NamedTuple):
    name: str
    port: int
    command: list[str]
    env: dict[str, str] = {}  # noqa: RUF012 - never changed


class Running(NamedTuple):
    port: int
    pid: int
    """Of the first process; whom it started may have sessions of their own, as Octavo's have."""

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """None of them runs meanwhile."""
        all_of_them = list(self._times())
        _signal(all_of_them, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(all_of_them, signal.SIGCONT)

    def cpu_s(self) -> float:
        """Processor time of all of them that still run."""
        return sum(self._times().values()) / os.sysconf("SC_CLK_TCK")

    def _times(self) -> dict[int, int]:
        """Ticks by process: the first one, those that it started, those that they started, and so on."""
        known = dict[int, tuple[int, int]]()  # who started it, ticks
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            known[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
        found = [pid for pid in (self.pid,) if pid in known]
        for pid in found:
            found += [child for child, (parent, _) in known.items() if parent == pid]
        return {pid: known[pid][1] for pid in found}


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def server(name: str, places: Places, port: int) -> Server:
    """One of `NAMES`. Raises KeyError."""
    models, cores = places.models, str(os.cpu_count() or 1)
    address = ["--host", HOST, "--port", str(port)]
    quiet = {"OMP_NUM_THREADS": cores, "HF_HUB_OFFLINE": "1"}
    octavo = [sys.executable, "-m", "octavo", "serve", "--set", f"server.port={port}"]
    llama = [str(places.llama / "llama-server"), *address, "-t", cores, "-np", "32", "--kv-unified", "-c", "32768"]
    vllm = [str(places.venvs / "vllm/bin/vllm"), "serve", str(models / "bf16"), "--served-model-name", NAME, *address]
    vllm += ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    openvino = [str(places.venvs / "openvino/bin/python"), str(SHIM), "openvino", str(models / "int8"), str(port)]
    continuous = [str(places.venvs / "vllm/bin/python"), str(SHIM), "transformers", str(models / "bf16"), str(port)]
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "octavo": ([*octavo, "default"], {}),
        "llama.cpp Q4_1": ([*llama, "-m", str(models / "q4_1.gguf")], {}),
        "llama.cpp Q8_0": ([*llama, "-m", str(models / "q8_0.gguf")], {}),
        "llama.cpp BF16": ([*llama, "-m", str(models / "bf16.gguf")], {}),
        "vLLM bf16": (vllm, quiet | cpu),
        "OpenVINO int8": (openvino, quiet),
        "transformers bf16": (continuous, quiet),
        "llama.cpp Q4_1, guesses": ([*llama, "--spec-type", "ngram-simple", "-m", str(models / "q4_1.gguf")], {}),
        "OpenVINO int8, guesses": ([part if part != "openvino" else "lookup" for part in openvino], quiet),
    }
    commands["octavo, no guesses"] = ([*octavo, "--set", "policies.speculation=off", "default"], {})
    for budget in BUDGETS:
        commands[f"octavo, chunk_budget {budget}"] = (
            [*octavo, "--set", f"scheduler.chunk_budget={budget}", "default"],
            {},
        )
    commands[BESIDE_BUDGET] = commands["OpenVINO int8"]
    return Server(name, port, *commands[name])


BUDGETS = (64, 128, 256)
"""Of `scheduler.chunk_budget`, beside the default one: the shorter steps are, the less a long prompt holds up streams,
and the later its own first token is."""
BESIDE_BUDGET = "OpenVINO int8, beside chunk_budget 128"
NAMES = (
    "octavo",
    "llama.cpp Q4_1",
    "llama.cpp Q8_0",
    "llama.cpp BF16",
    "vLLM bf16",
    "OpenVINO int8",
    "transformers bf16",
    "llama.cpp Q4_1, guesses",
    "OpenVINO int8, guesses",
    "octavo, no guesses",
    *(f"octavo, chunk_budget {budget}" for budget in BUDGETS),
    BESIDE_BUDGET,
)
OTHERWISE = {BESIDE_BUDGET: "octavo, chunk_budget 128"}
"""By peer: the Octavo that is beside it, where it is not the default one."""


@contextmanager
def running(given: Server) -> Iterator[Running]:
    """Started, ready, and gone at the end. Raises RuntimeError with its last words if it does not start."""
    with tempfile.TemporaryDirectory(prefix="peer-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        run = ["--set", f"run_dir={folder}/run"] if given.name.startswith("octavo") else []
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*given.command, *run],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=folder,
                env={**os.environ, **given.env},
                start_new_session=True,
            )
            try:
                _wait_ready(process, given.port, log)
                yield Running(given.port, process.pid)
            finally:
                _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    words = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"it did not start:\n{words}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it started: they are a session of their own."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
