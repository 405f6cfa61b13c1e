"""The CUDA executor with the emulator for a GPU: the same code and the same kernel sources, on a CPU and very slowly.

For tests, and for work on the executor where there is no GPU. In fp16, whose 11 bits leave the tokens of small models
as they are in fp32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Self

import torch

from octavo.core.config.schema import Config
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.graphs import Replay
from octavo.executors.threads import default_threads
from octavo.kernels.cuda.emulator import Emulator
from octavo.kernels.cuda.launch import Kernels

THREADS = 64
"""Of a block in kernels that may have any number: each costs a fibre here."""


class HostMemory:
    """Half of the machine's memory, whatever was taken of it: nothing here is worth measuring."""

    def free(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    def peak_of(self, work: Callable[[], None]) -> int:
        return 0


def again(work: Callable[[], None]) -> Replay:
    """A recorder: a replay does the work again."""
    return work


class EmulatedCudaExecutor(CudaExecutor):
    """Entry point `cuda-emulated` of `octavo.executor`."""

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `EmulatorError` without g++, `ModelError` when the model does not fit the kernels."""
        torch.set_num_threads(config.executor.threads or default_threads())
        kernels = Kernels(Emulator(), torch.device("cpu"), threads=THREADS, sampling_threads=THREADS)
        return cls.on(kernels, config, torch.float16, HostMemory(), again)
