"""A batching policy of one's own: short prompts go first, but whoever has waited for `patience_s` goes before them.

The whole policy is a class with a method. It sees frozen columns and says whom to admit in which order; what fits, and
everything else, is the kernel's business.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import PolicyOptions, Running, Selection, Step, Waiting


class Polite:
    contract = 1
    """The version of octavo.policies.contract that this was written for."""

    class Options(PolicyOptions, frozen=True):
        """`--set policies.options.batching.patience_s=5`; anything else than a positive number stops the start."""

        patience_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0

    def __init__(self, options: Options) -> None:
        self._patience_ns = int(options.patience_s * 1e9)

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        patient = step.now_ns - waiting.arrival_ns < self._patience_ns
        to_compute = waiting.known - waiting.cached
        # The last key sorts first: those who waited long in order of arrival, then the others by length.
        order = np.lexsort((np.where(patient, to_compute, 0), patient))
        return Selection(order.astype(np.int32), when_blocked="skip")
