"""Runs the kernels' sources on the CPU, compiled by g++ with emulator.h: for tests, and where there is no GPU.

Tensors are CPU tensors; everything else is as on a GPU, launches included. Slow on purpose (see emulator.h).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from octavo.kernels.cuda.cache import digest, stored
from octavo.kernels.cuda.library import Argument, Function, Shape
from octavo.kernels.cuda.sources import HERE, Instance, closure

# Kernels look at the same bytes as different types, and rounding must not depend on what the compiler contracts.
_STRICT = ("-fno-strict-aliasing", "-ffp-contract=off")
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-U_FORTIFY_SOURCE", *_STRICT)
_COMPILE_S = 240


class EmulatorError(Exception):
    """A kernel did what it must not, or cannot be compiled."""


class Emulator:
    """A library of kernels, as an sm_90a has them, or without `bulk` what came before. `order` is how threads are
    interleaved, `folder` where the sources are."""

    def __init__(
        self, order: int = 0, *, bulk: bool = True, shared_limit: int = 227 * 1024, folder: Path = HERE
    ) -> None:
        self.order = order
        self.blocks = 16
        self.bulk = self.wgmma = bulk
        self.shared_limit = shared_limit
        self._folder = folder
        self._loaded: dict[Instance, ctypes.CDLL] = {}

    def ordered(self, order: int, *, bulk: bool, shared_limit: int | None = None) -> Emulator:
        """The same kernels, compiled once, run otherwise."""
        other = Emulator(order, bulk=bulk, shared_limit=shared_limit or self.shared_limit, folder=self._folder)
        other._loaded = self._loaded
        return other

    def prepare(self, instances: list[Instance]) -> None:
        """Compile kernels, as many at a time as there are cores; one by one would do, but takes longer."""
        missing = [instance for instance in dict.fromkeys(instances) if instance not in self._loaded]
        if missing:
            _header()  # before many want it at once
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            paths = pool.map(lambda instance: _compiled(instance, self._folder), missing)
            self._loaded |= {one: ctypes.CDLL(str(path)) for one, path in zip(missing, paths, strict=True)}

    def get_function(self, instance: Instance) -> Function:
        self.prepare([instance])
        library, name = self._loaded[instance], instance.name.encode()

        def launch(grid: Shape, block: Shape, args: tuple[Argument, ...], *, shared_mem: int = 0) -> None:
            values = [np.array(a, dtype=np.int64) if isinstance(a, int) else np.array(a) for a in args]
            pointers = (ctypes.c_void_p * len(args))(*(value.ctypes.data for value in values))
            shape = (ctypes.c_uint * 6)(*_three(grid), *_three(block))
            why = ctypes.create_string_buffer(300)
            if library.emulator_launch(
                name, shape, ctypes.c_size_t(shared_mem), pointers, self.order, why, ctypes.c_size_t(len(why))
            ):
                raise EmulatorError(f"{instance.name} in order {self.order}: {why.value.decode()}")

        return launch


def _three(shape: Shape) -> Shape:
    return (*shape, 1, 1)[:3]


def _compiled(instance: Instance, folder: Path) -> Path:
    file, name = instance
    texts = closure(file, folder) | closure("emulator.h")
    source = f"EMULATOR_KERNEL({name});\n"
    unit = f'#include "{folder / file}"\n{source}'

    def make(path: Path) -> None:
        header = _header().with_suffix("")  # g++ adds the .gch
        try:
            _compile(["-", "-shared", "-include", str(header), f"-I{folder}", f"-I{HERE}", "-o", str(path)], unit)
        except EmulatorError as error:
            raise EmulatorError(f"{file} does not compile:\n{error}") from error

    return stored(f"{Path(file).stem}-{_key(texts, file, source)}.so", make)


def _header() -> Path:
    """The emulator, compiled ahead: most of what a compilation would spend its time on."""
    texts = closure("emulator.h")
    name = f"emulator-{_key(texts)}.h.gch"
    return stored(name, lambda path: _compile([str(HERE / "emulator.h"), "-o", str(path)], "", kind="c++-header"))


def _compile(options: list[str], source: str, kind: str = "c++") -> None:
    command = ["g++", "-x", kind, *_FLAGS, *options]
    done = subprocess.run(command, input=source, text=True, capture_output=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise EmulatorError(done.stderr[:4000])


@cache
def _compiler() -> str:
    """Its version."""
    if shutil.which("g++") is None:
        raise EmulatorError("the emulator needs g++: apt install g++")
    command = ["g++", "-dumpfullversion", "-dumpmachine"]
    return subprocess.run(command, text=True, capture_output=True, timeout=_COMPILE_S, check=True).stdout


def _key(texts: dict[str, str], *parts: str) -> str:
    everything = [_compiler(), *_FLAGS, *parts, *(f"{name}\0{text}" for name, text in sorted(texts.items()))]
    return digest(part.encode() for part in everything)
