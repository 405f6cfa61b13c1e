"""Runs kernels on an NVIDIA GPU: cubins of ours, loaded and launched by CuPy on torch's current stream.

The only module that imports CuPy, and only when a device is made. It allocates nothing on the GPU.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from octavo.kernels.cuda.cubins import arch_for, cubin
from octavo.kernels.cuda.library import Argument, Function, Shape
from octavo.kernels.cuda.sources import HERE, Instance

_SHARED_OPT_IN = 97
"""cudaDevAttrMaxSharedMemoryPerBlockOptin: more than the 48 KiB that every kernel may have."""


class DeviceError(OSError):
    """There is no GPU that kernels can run on."""


class _Stream:
    """As much of a CuPy stream as a launch looks at."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Device:
    """The library of kernels of one GPU."""

    def __init__(self, device: torch.device, folder: Path = HERE) -> None:
        """`folder` is where the sources are."""
        if not torch.cuda.is_available():
            raise DeviceError(
                f"torch {torch.__version__} finds no GPU: "
                + ("it is a build for CPUs" if torch.version.cuda is None else "is the NVIDIA driver installed?")
            )
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            major = (torch.version.cuda or "13").partition(".")[0]
            raise DeviceError(f"no CuPy here ({error}): pip install cupy-cuda{major}x") from error
        self._device, self._folder = device, folder
        properties = torch.cuda.get_device_properties(device)
        capability = 10 * properties.major + properties.minor
        self.arch = arch_for(capability)
        self.bulk = capability >= 90
        self.wgmma = self.arch == "sm_90a"
        self.blocks = 2 * properties.multi_processor_count
        self.shared_limit = int(self._cupy.cuda.runtime.deviceGetAttribute(_SHARED_OPT_IN, device.index))

    def get_function(self, instance: Instance) -> Function:
        made = cubin(instance, self.arch, sources=self._folder)
        with torch.cuda.device(self._device):
            kernel = self._cupy.RawModule(path=str(made.path)).get_function(made.entry)
            raw = kernel.kernel
        allowed = 48 * 1024

        def launch(grid: Shape, block: Shape, args: tuple[Argument, ...], *, shared_mem: int = 0) -> None:
            nonlocal allowed
            if shared_mem > allowed:
                kernel.max_dynamic_shared_size_bytes = allowed = shared_mem
            stream = _Stream(torch.cuda.current_stream(self._device).cuda_stream)
            raw(grid, block, args, shared_mem=shared_mem, stream=stream)

        return launch
