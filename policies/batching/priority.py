"""The most urgent first; a waiting urgent one may take a running less urgent one's slot."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import PolicyOptions, Running, Selection, Step, Waiting


class Priority:
    """By the client's priority, among equals by arrival."""

    class Options(PolicyOptions, frozen=True):
        preempt: bool = True
        """Whether slots are taken from the less urgent; else the urgent ones only go first in the queue."""

    def __init__(self, options: Options) -> None:
        self._preempt = options.preempt

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        admit = np.argsort(-waiting.priority.astype(np.int64), kind="stable").astype(np.int32)
        if not self._preempt or not len(admit) or not len(running):
            return Selection(admit)
        first = admit[0]
        blocks = -(-(waiting.known[first] + 1) // step.block_size)
        if step.free_slots and blocks <= step.credit:
            return Selection(admit)
        # The least urgent gives way first, among equals the latest; nobody gives way to an equal.
        giving = np.lexsort((-running.arrival_ns, running.priority)).astype(np.int32)
        return Selection(admit, preempt=giving[running.priority[giving] < waiting.priority[first]])
