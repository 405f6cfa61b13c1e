"""The filters and scores that `scored` finds by name. Each score is near 0 to 1, so that weights mean the same."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import NEVER, Floats, Mask, Running, Step, Waiting


def fits(step: Step, waiting: Waiting, running: Running) -> Mask:
    """What it knows fits into the pool now. With nobody running, all pass: somebody has to."""
    blocks = -(-(waiting.known - waiting.cached + 1) // step.block_size)
    return np.asarray(blocks <= step.credit) if len(running) else np.ones(len(waiting), dtype=np.bool_)


def age(step: Step, waiting: Waiting, running: Running) -> Floats:
    """Time waited: a half after ten seconds."""
    waited_s = np.maximum(0.0, (step.now_ns - waiting.arrival_ns) / 1e9)
    return waited_s / (waited_s + 10.0)


def urgency(step: Step, waiting: Waiting, running: Running) -> Floats:
    """Time left to the deadline: a half at ten seconds, nought without one."""
    left_s = np.maximum(0.0, (waiting.deadline_ns - step.now_ns) / 1e9)
    return np.where(waiting.deadline_ns == NEVER, 0.0, 10.0 / (left_s + 10.0))


def priority(step: Step, waiting: Waiting, running: Running) -> Floats:
    """Its priority, among those who wait: 0 for the lowest, 1 for the highest."""
    if not len(waiting):
        return np.zeros(0)
    low, high = int(waiting.priority.min()), int(waiting.priority.max())
    return np.asarray((waiting.priority - low) / max(1, high - low), dtype=np.float64)


def prefix(step: Step, waiting: Waiting, running: Running) -> Floats:
    """The part of its prompt that the prefix tree holds."""
    return np.asarray(waiting.cached / np.maximum(1, waiting.known), dtype=np.float64)


def short(step: Step, waiting: Waiting, running: Running) -> Floats:
    """Little work left: a half at a thousand tokens."""
    left = (waiting.known - waiting.cached) + waiting.output_left
    return np.asarray(1000.0 / (1000.0 + left), dtype=np.float64)
