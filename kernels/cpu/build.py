"""Compile the step library at first use: plain g++ or clang++, one object per instruction set, into a cache folder.

The result's name is a hash of sources, flags and compiler, so an upgrade of any builds anew and never overwrites a
library that is in use. Two processes may build at once; the last rename wins, with equal bytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi")
# A product and a sum must not become one operation here and two there: a row's bits would depend on its tile.
_EXACT = ("-ffp-contract=off",)
_LEVELS = {
    "isa_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"),
}
_UNITS = ("dispatch", "matrix", "step", "team", "isa_plain")
_TIMEOUT_S = 600


class BuildError(OSError):
    """The library could not be built; the text says what was run and what is lost without it."""


def library(cache: Path, extra: tuple[str, ...] = ()) -> Path:
    """The library's file below `cache`, built if it is not there. `extra` flags come last (sanitizers, tests)."""
    compiler = _compiler()
    units = {name: (*_FLAGS, *_EXACT, *flags, *extra) for name, flags in _units().items()}
    target = cache / f"cpu-{_key(compiler, units)}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
            _build(compiler, units, Path(folder), extra).replace(target)
    return target


def _units() -> dict[str, tuple[str, ...]]:
    levels = _LEVELS if platform.machine() in ("x86_64", "AMD64") else {}
    return levels | dict.fromkeys(_UNITS, ())


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError(
        "the native CPU executor needs a C++17 compiler and none was found (looked for $CXX, g++, clang++, c++); "
        'install one (Debian: apt install g++), or set executor.kind = "cpu" for the slower torch executor'
    )


def _key(compiler: str, units: dict[str, tuple[str, ...]]) -> str:
    digest = hashlib.sha256(_run([compiler, "--version"]).encode())
    for path in sorted(p for p in SOURCES.iterdir() if p.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr(sorted(units.items())).encode())
    return digest.hexdigest()[:20]


def _build(compiler: str, units: dict[str, tuple[str, ...]], folder: Path, extra: tuple[str, ...]) -> Path:
    def compile_unit(name: str) -> str:
        target = str(folder / f"{name}.o")
        _run([compiler, *units[name], "-c", str(SOURCES / f"{name}.cpp"), "-o", target])
        return target

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_unit, units))
    _run([compiler, "-shared", "-pthread", *extra, *objects, "-o", str(folder / "cpu.so")])
    return folder / "cpu.so"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
