"""How many blocks a KV pool has: what the device's memory leaves once the weights are there and the worst step has run.

Knows no CUDA: a `Memory` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from octavo.core.models.errors import ModelError

RESERVED = 512 * 2**20
"""Bytes left to the driver, to recorded graphs, to cuBLAS and to other processes' growth."""
ADAPTERS = RESERVED // 2
"""Of these, bytes that LoRA adapters may take that nobody had named when the pool was made."""


class Memory(Protocol):
    def free(self) -> int:
        """Bytes that nobody holds; what an allocator only keeps counts as free."""
        ...

    def peak_of(self, work: Callable[[], None]) -> int:
        """The most bytes that were held at once while `work` ran, beyond those before it."""
        ...


class CudaMemory:
    """Of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device) - before)


class Room(NamedTuple):
    """Blocks of the pool, and bytes that are left for adapters."""

    blocks: int
    adapters: int


def room_for(
    memory: Memory,
    worst_step: Callable[[], None],
    block_bytes: int,
    wanted: int,
    block_size: int,
    held: int,
    named: int,
) -> Room:
    """`wanted` blocks, or with 0 as many as there is memory for, beside `held` bytes that will be taken whatever the
    pool's size, `named` of which are for adapters. Raises `ModelError` when there is too little."""
    peak = memory.peak_of(worst_step)
    free = memory.free() - held
    room = max(0, free - peak - RESERVED) // block_bytes
    if room < max(1, wanted):
        raise ModelError(
            f"the GPU has {free / 2**30:.2f} GiB free beside the weights; a step may take {peak / 2**30:.2f} and "
            f"{RESERVED / 2**30:.2f} stay unused, which leaves a pool of {room * block_size} tokens"
            + (f", kv.tokens asks for {wanted * block_size}; lower it" if wanted else "; lower scheduler.chunk_budget")
        )
    blocks = wanted or room
    return Room(blocks, named + free - peak - RESERVED - blocks * block_bytes + ADAPTERS)
