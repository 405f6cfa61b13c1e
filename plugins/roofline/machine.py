"""What this machine's processors can do, measured: fp32 multiply-adds of a matrix product, and bytes read from memory.

Kept in the user's cache folder, for this machine and number of processors; measured again when asked.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from octavo.core.models.cache import cache_folder
from octavo.plugins.roofline.probe import Rates


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`flops` a second and `bytes` a second, of `cpus` processors together; `source` says where that is from."""

    flops: float
    bytes: float
    cpus: int
    source: str

    @property
    def ridge(self) -> float:
        """Operations per byte at which both take the same time."""
        return self.flops / self.bytes

    @property
    def told(self) -> str:
        return (
            f"{self.flops / 1e9:.1f} GFLOP/s and {self.bytes / 1e9:.1f} GB/s at best ({self.source}); "
            f"ridge at {self.ridge:.1f} FLOP/byte"
        )


def machine(path: Path | None = None, *, again: bool = False) -> Machine:
    """The kept figures, or new ones. What is kept for other processors than these is not used."""
    path = path or _cache()
    cpus = len(os.sched_getaffinity(0))
    if not again:
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=Machine)
        except (OSError, msgspec.MsgspecError):
            kept = None
        if kept is not None and kept.cpus == cpus and kept.source == _name():
            return kept
    found = measure(cpus)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return found


def measure(cpus: int) -> Machine:
    """Takes some seconds: all processors at a time, as an executor has them."""
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "octavo.plugins.roofline.probe"]
    probes = [subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **one}) for _ in range(cpus)]
    rates = [msgspec.json.decode(probe.communicate()[0], type=Rates) for probe in probes]
    return Machine(
        flops=sum(rate.flops for rate in rates), bytes=sum(rate.bytes for rate in rates), cpus=cpus, source=_name()
    )


def _name() -> str:
    """Of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cache() -> Path:
    return cache_folder() / "machine.json"
