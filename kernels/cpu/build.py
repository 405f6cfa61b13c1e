"""The step library's file: beside these sources if the package brought it, else in a cache folder, built at need.

Plain g++ or clang++, one object per instruction set. The file's name is a hash of sources and flags, so a change of any
builds anew and never overwrites a library that is in use; a library that is there needs no compiler. Of processes that
want the same one at the same time, one builds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi")
# A product and a sum must not become one operation here and two there: a row's bits would depend on its tile.
_EXACT = ("-ffp-contract=off",)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")
# Compilers before g++ 11 and clang++ 12 do not take these; the library is then without that level.
AMX = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")
_LEVELS: dict[str, tuple[str, ...]] = {
    "isa_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512": _AVX512,
    "isa_amx": (*_AVX512, *AMX),
}
_ARM_LEVELS: dict[str, tuple[str, ...]] = {"isa_neon": ("-march=armv8.2-a+dotprod",)}
_UNITS = ("check", "dispatch", "matrix", "sample", "step", "team")
# What an x86 without AVX2 or an Arm without dot products takes, which is hardly ever run: -O1 builds it in a fifth of
# the time of -O3. Other machines have nothing else.
_SELDOM = ("-O1",)
_TIMEOUT_S = 600


class BuildError(OSError):
    """The library could not be built; the text says what was run and what is lost without it."""


def library(cache: Path, extra: tuple[str, ...] = (), *, before: Callable[[], None] = lambda: None) -> Path:
    """The library's file, built below `cache` if there is none; `before` is called before that. `extra` flags come last
    (sanitizers, tests)."""
    units = {name: (*made, *extra) for name, made in flags().items()}
    name = f"cpu-{_key(units)}.so"
    if (shipped := SOURCES / name).exists():
        return shipped
    target = cache / name
    if not target.exists():
        compiler = find_compiler()
        before()
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one(cache):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
                    _build(compiler, units, Path(folder), extra).replace(target)
    return target


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder; the system drops it with the process, so a dead holder blocks nobody."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def flags() -> dict[str, tuple[str, ...]]:
    """By unit, on this machine; those that take longest come first."""
    x86, arm = platform.machine() in ("x86_64", "AMD64"), platform.machine() in ("aarch64", "arm64")
    levels = _LEVELS if x86 else _ARM_LEVELS if arm else {}
    plain: dict[str, tuple[str, ...]] = {"isa_plain": _SELDOM if levels else (), **dict.fromkeys(_UNITS, ())}
    return {name: (*_FLAGS, *_EXACT, *own) for name, own in (levels | plain).items()}


def find_compiler() -> str:
    """Raises `BuildError` that says how to get one."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError(
        "the native CPU executor needs a C++17 compiler and none was found (looked for $CXX, g++, clang++, c++); "
        'install one (Debian: apt install g++), or set executor.kind = "cpu" for the slower torch executor'
    )


def _key(units: dict[str, tuple[str, ...]]) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(p for p in SOURCES.iterdir() if p.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr(sorted(units.items())).encode())
    return digest.hexdigest()[:20]


def _build(compiler: str, units: dict[str, tuple[str, ...]], folder: Path, extra: tuple[str, ...]) -> Path:
    unknown = AMX if not _takes(compiler, AMX, folder) else ()

    def compile_unit(name: str) -> str:
        target, flags = str(folder / f"{name}.o"), [flag for flag in units[name] if flag not in unknown]
        _run([compiler, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", target])
        return target

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_unit, units))
    _run([compiler, "-shared", "-pthread", *extra, *objects, "-o", str(folder / "cpu.so")])
    return folder / "cpu.so"


def _takes(compiler: str, flags: tuple[str, ...], folder: Path) -> bool:
    target = str(folder / "empty.o")
    try:
        _run([compiler, *flags, "-x", "c++", "-c", os.devnull, "-o", target])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
