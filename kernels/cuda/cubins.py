"""Kernels compiled for a GPU, each once: a cubin's name says everything that it was made from."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from octavo.kernels.cuda.cache import digest, stored
from octavo.kernels.cuda.nvrtc import Compiled, Figures, NvrtcError, nvrtc
from octavo.kernels.cuda.sources import HERE, Instance, closure

OLDEST = 80
_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")


class Cubin(NamedTuple):
    path: Path
    entry: str
    figures: Figures


def arch_for(capability: int) -> str:
    """What to compile for, for a GPU of compute capability 90 (= 9.0): the nearest that the compiler knows."""
    if capability < OLDEST:
        raise NvrtcError(f"the GPU is sm_{capability}, but kernels need sm_{OLDEST} (Ampere) or newer")
    known = [arch for arch in nvrtc().archs if arch // 10 == capability // 10 and arch <= capability]
    if not known:
        raise NvrtcError(f"NVRTC {nvrtc().version} does not know sm_{capability}; install a newer one")
    return "sm_90a" if max(known) == 90 else f"sm_{max(known)}"  # what only Hopper has (wgmma) is in its own form


def checked_arch(arch: str) -> str:
    """`arch` itself, if it is one that kernels can be compiled for. Raises `NvrtcError`."""
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None:
        raise NvrtcError(f"{arch!r} is no arch: write sm_80, or sm_90a for what only that one has")
    if int(number[1]) < OLDEST:
        raise NvrtcError(f"{arch} is too old: kernels need sm_{OLDEST} (Ampere) or newer")
    if int(number[1]) not in nvrtc().archs:
        known = ", ".join(f"sm_{one}" for one in nvrtc().archs if one >= OLDEST)
        raise NvrtcError(f"NVRTC {nvrtc().version} does not know {arch}; it knows {known}")
    return arch


def cubin(instance: Instance, arch: str, *, where: Path | None = None, sources: Path = HERE) -> Cubin:
    """`where` keeps cubins elsewhere than in the user's cache, for instance to ship them."""
    every = closure(instance.file, sources)
    texts = {name: text for name, text in every.items() if not name.startswith("emulator")}  # those are for hosts
    options = (f"-arch={arch}", *_OPTIONS)
    parts = [nvrtc().version, *options, *instance, *(f"{name}\0{text}" for name, text in sorted(texts.items()))]
    name = f"{Path(instance.file).stem}-{arch}-{digest(part.encode() for part in parts)}"

    @cache
    def compiled() -> Compiled:
        return nvrtc().compile(instance.name, texts, instance.file, options)

    def describe(path: Path) -> None:
        about = {"instance": instance.name, "entry": compiled().entry, "figures": asdict(compiled().figures)}
        path.write_text(json.dumps(about), encoding="utf-8")

    path = stored(f"{name}.cubin", lambda to: _write(to, compiled().cubin), where)
    about = json.loads(stored(f"{name}.json", describe, where).read_text(encoding="utf-8"))
    return Cubin(path, about["entry"], Figures(**about["figures"]))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
