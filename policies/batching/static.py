"""Wait for N, then run all of them to the end: the baseline from before continuous batching."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import NEVER, PolicyOptions, Running, Selection, Step, Waiting


class Static:
    """A batch is closed when its N are there; nobody joins it later, and the next one waits for its last sequence.

    The kernel lets nobody wait for a batch for more than ten seconds: then it starts without being full."""

    class Options(PolicyOptions, frozen=True):
        size: Annotated[int, msgspec.Meta(ge=1)] = 8
        """N: sequences in a batch."""

    def __init__(self, options: Options) -> None:
        self._size = options.size
        self._closed_ns = -1
        """Who arrived later than this is not in the batch."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        size = min(self._size, step.free_slots)
        if len(running) and int(running.arrival_ns.max()) > self._closed_ns:  # the kernel did not wait any longer
            self._closed_ns = max([*running.arrival_ns.tolist(), *waiting.arrival_ns[-1:].tolist()])
        elif not len(running) and len(waiting) >= size > 0:
            self._closed_ns = int(waiting.arrival_ns[size - 1])
        admit = np.flatnonzero(waiting.arrival_ns <= self._closed_ns).astype(np.int32)
        return Selection(admit, wake_ns=None if len(admit) else NEVER)
