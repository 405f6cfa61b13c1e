"""Earliest deadline first, and an early no to what cannot make it any more."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import NEVER, Floats, Observed, PolicyOptions, Running, Selection, Step, Waiting


class Deadline:
    """By deadline, among equals by arrival; requests without one come after those with one.

    The time that a request needs is estimated from the steps seen: its prompt at the rate of prefilling steps, and a
    step for each token that it may produce. Who would be late even if it were alone is refused now: its time
    goes to somebody who can still make it, and its client can ask elsewhere."""

    class Options(PolicyOptions, frozen=True):
        refuse: bool = True
        margin: Annotated[float, msgspec.Meta(ge=0)] = 1.0
        """The estimate is multiplied by this: below 1 refuses late, above 1 early."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._step_ns = 0.0
        """Mean time of a step that only decodes; 0 until seen."""
        self._token_ns = 0.0
        """Mean time of a prompt token."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        order = np.argsort(waiting.deadline_ns, kind="stable").astype(np.int32)
        if not self._options.refuse:
            return Selection(order)
        late = (waiting.deadline_ns < NEVER) & (step.now_ns + self._needs(waiting) > waiting.deadline_ns)
        return Selection(order[~late[order]], refuse=np.flatnonzero(late).astype(np.int32) if late.any() else None)

    def _needs(self, waiting: Waiting) -> Floats:
        prefill = (waiting.known - waiting.cached) * self._token_ns
        needs: Floats = self._options.margin * (prefill + waiting.output_left * self._step_ns)
        return needs

    def observe(self, observed: Observed) -> None:
        for ns, prefill, decodes in zip(
            observed.duration_ns.tolist(), observed.prefill_tokens.tolist(), observed.decodes.tolist(), strict=True
        ):
            if decodes and not prefill:
                self._step_ns = _towards(self._step_ns, ns)
            elif prefill:
                self._token_ns = _towards(self._token_ns, max(0.0, ns - (self._step_ns if decodes else 0.0)) / prefill)


def _towards(mean: float, value: float) -> float:
    return value if mean == 0 else mean + (value - mean) / 16
