"""Host memory behind the pool: evicted blocks go there and come back by a bind's copies (see `core.kv.host`).

A block's bytes of all layers lie together there, so that one transfer moves it. Transfers are in the order of torch's
current stream, before the step that needs them; pinned memory lets the host go on meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cuda.launch import Kernels


class HostPool:
    """`places` blocks, whose ids follow those of the pool. `pools` are the layers' [blocks, block_bytes]."""

    def __init__(self, kernels: Kernels, pools: list[Tensor], places: int) -> None:
        self._kernels = kernels
        self._pools = pools
        self._blocks, block_bytes = pools[0].shape
        pinned = kernels.device.type == "cuda"
        self._host = torch.zeros(places, len(pools), block_bytes, dtype=torch.uint8, pin_memory=pinned)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """As if all were read before any is written; a pair has a block on one side at least."""
        if not pairs:
            return
        inner = [(source, target) for source, target in pairs if max(source, target) < self._blocks]
        out = [(source, target - self._blocks) for source, target in pairs if target >= self._blocks]
        back = [(source - self._blocks, target) for source, target in pairs if source >= self._blocks]
        # What goes out, and what is copied, is read into a staging buffer first.
        leaving = self._kernels.gather_blocks(self._pools, [block for block, _ in out])
        coming = self._kernels.staging(self._pools, len(back))
        for i, (place, _) in enumerate(back):
            coming[i].copy_(self._host[place], non_blocking=True)
        for i, (_, place) in enumerate(out):
            self._host[place].copy_(leaving[i], non_blocking=True)
        self._kernels.copy_blocks(self._pools, inner)
        self._kernels.scatter_blocks(self._pools, [block for _, block in back], coming)
