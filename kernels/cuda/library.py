"""What the launching of kernels asks of whatever runs them: a GPU, or the emulator in its place."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from octavo.kernels.cuda.sources import Instance

Argument: TypeAlias = int | np.generic
"""As CuPy takes it: an int is 8 bytes (a pointer), a NumPy scalar goes by value."""
Shape: TypeAlias = tuple[int, ...]


class Function(Protocol):
    """A kernel, with CuPy's calling convention. Runs on torch's current stream."""

    def __call__(self, grid: Shape, block: Shape, args: tuple[Argument, ...], *, shared_mem: int = 0) -> None: ...


class Library(Protocol):
    @property
    def bulk(self) -> bool:
        """Are there bulk copies (sm_90 and later)?"""
        ...

    @property
    def wgmma(self) -> bool:
        """Can warpgroups multiply (sm_90a)?"""
        ...

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that a block may have."""
        ...

    @property
    def blocks(self) -> int:
        """Blocks of attention that run at once."""
        ...

    def get_function(self, instance: Instance) -> Function: ...
