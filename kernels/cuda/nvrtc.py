"""NVIDIA's run-time compiler, by its C interface: a source with its headers as text to a cubin. Needs no GPU or driver.

Only the library itself is needed, wherever it is: of a CUDA build of torch, of the package nvidia-cuda-nvrtc, or of an
installed toolkit. No header of NVIDIA's is read.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class NvrtcError(OSError):
    """The compiler is missing, does not know the GPU, or refuses a source."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What ptxas says of a kernel: bytes but for registers."""

    registers: int
    spilled: int
    stack: int
    loss: bool = False
    """The assembler says that it gave up speed: products of warpgroups wait for one another, because it found registers
    touched while they were on their way, or registers are not handed over."""


@dataclass(frozen=True, slots=True)
class Compiled:
    cubin: bytes
    entry: str
    """The kernel's name in the cubin."""
    figures: Figures


_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_USED = re.compile(
    r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers",
    re.DOTALL,
)


_LOSS = "Potential Performance Loss"


def _candidates() -> list[str]:
    found = []
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for name in _LIBRARIES:
            found += sorted(str(path) for path in Path(folder).glob(f"*/lib/{name}"))
    return [*found, *_LIBRARIES]


class Nvrtc:
    """Use `nvrtc()`: there is one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.archs = tuple(archs)
        """As 80 for sm_80."""

    def compile(self, name: str, texts: dict[str, str], file: str, options: tuple[str, ...]) -> Compiled:
        """The kernel that the C++ expression `name` means in `file`. `texts` are it and what it includes."""
        headers = {other: text.encode() for other, text in texts.items() if other != file}
        program = ctypes.c_void_p()
        array = ctypes.c_char_p * len(headers)
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            texts[file].encode(),
            file.encode(),
            len(headers),
            array(*headers.values()),
            array(*(other.encode() for other in headers)),
        )
        try:
            self._call("nvrtcAddNameExpression", program, name.encode())
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._bytes(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise NvrtcError(f"{file}: {name} with {' '.join(options)} does not compile:\n{log[:4000]}")
            entry = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(entry))
            lowered = (entry.value or b"").decode()
            return Compiled(self._bytes(program, "nvrtcGetCUBIN"), lowered, _figures(log, lowered))
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(what, program, buffer)
        return buffer.raw

    def _call(self, function: str, *args: object) -> None:
        if status := getattr(self._library, function)(*args):
            text = self._library.nvrtcGetErrorString
            text.restype = ctypes.c_char_p
            raise NvrtcError(f"{function} failed: {text(status).decode()}")


def _figures(log: str, entry: str) -> Figures:
    for name, stack, spilled, registers in _USED.findall(log):
        if name == entry:
            return Figures(int(registers), int(spilled), int(stack), _LOSS in log)
    raise NvrtcError(f"ptxas did not report on {entry}; it said: {log[:1000]}")


def _beside(path: str, pattern: str) -> list[Path]:
    return sorted(Path(path).parent.glob(pattern)) if "/" in path else []


@cache
def nvrtc() -> Nvrtc:
    for path in _candidates():
        try:
            for builtins in _beside(path, "libnvrtc-builtins.so.*"):  # it looks for them by name only
                ctypes.CDLL(str(builtins))
            return Nvrtc(ctypes.CDLL(path))
        except OSError:
            continue
    raise NvrtcError(
        f"no NVRTC here ({' or '.join(_LIBRARIES)}): it comes with a CUDA build of torch, "
        "or pip install nvidia-cuda-nvrtc"
    )
