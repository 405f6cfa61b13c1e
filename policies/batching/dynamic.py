"""Wait for N or for a delay, then run them all to the end (NVIDIA Triton's dynamic batching)."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import PolicyOptions, Running, Selection, Step, Waiting


class Dynamic:
    """A batch is closed when N are there or the first of them has waited for the delay; nobody joins it later."""

    class Options(PolicyOptions, frozen=True):
        size: Annotated[int, msgspec.Meta(ge=1)] = 8
        """N: most sequences in a batch."""
        delay_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 100.0
        """Longest that the first one waits for company."""

    def __init__(self, options: Options) -> None:
        self._size = options.size
        self._delay_ns = int(options.delay_ms * 1e6)
        self._closed_ns = -1
        """Who arrived later than this is not in the batch."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        wake_ns = None
        if not len(running) and len(waiting):
            size = max(1, min(self._size, step.free_slots))
            wake_ns = int(waiting.arrival_ns[0]) + self._delay_ns
            if len(waiting) >= size or step.now_ns >= wake_ns:
                self._closed_ns = int(waiting.arrival_ns[min(size, len(waiting)) - 1])
        admit = np.flatnonzero(waiting.arrival_ns <= self._closed_ns).astype(np.int32)
        return Selection(admit, wake_ns=None if len(admit) else wake_ns)
