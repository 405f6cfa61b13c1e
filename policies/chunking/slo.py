"""Chunks as long as the target for time between tokens allows, by the step times measured."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Ints, Observed, PolicyOptions, Step


class Slo:
    """A step takes about `fixed + slope × prompt tokens` beside the decodes; both are learnt from the steps seen
    (recursive least squares that forgets), and the budget is what keeps a step within the target. With nobody decoding,
    nobody waits for a token and the whole budget is used."""

    class Options(PolicyOptions, frozen=True):
        itl_ms: Annotated[float, msgspec.Meta(gt=0)] = 50.0
        """Target for the time between two tokens of a sequence."""
        least: Annotated[int, msgspec.Meta(ge=1)] = 16
        """Tokens of prompts in each step whatever the target says, so that prompts get done."""

    def __init__(self, options: Options) -> None:
        self._target_ns = options.itl_ms * 1e6
        self._least = options.least
        self._weights = np.zeros(5)
        """Decaying sums over steps with decodes: 1, tokens, ns, tokens², tokens × ns."""

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        room = max(0, step.chunk_budget - decode_tokens)
        if decode_tokens:
            room = min(room, max(self._least, self._within_target()))
        before: Ints = np.cumsum(remaining, dtype=np.int32) - remaining
        return np.minimum(np.maximum(room - before, 0), remaining)

    def observe(self, observed: Observed) -> None:
        for ns, tokens, decodes in zip(
            observed.duration_ns.tolist(), observed.prefill_tokens.tolist(), observed.decodes.tolist(), strict=True
        ):
            if decodes:
                self._weights = 0.98 * self._weights + (1.0, tokens, ns, tokens * tokens, tokens * ns)

    def _within_target(self) -> int:
        """Prompt tokens of a step that takes as long as the target; as many as you like until steps were seen."""
        n, tokens, ns, squares, products = self._weights.tolist()
        spread = n * squares - tokens * tokens
        if n == 0:
            return 1 << 30
        if spread <= 1e-9 * n * max(squares, 1.0):  # all alike: nothing known of the slope, so go by the mean
            mean_ns, mean = ns / n, tokens / n
            return int(max(1.0, 2 * mean) if mean_ns < self._target_ns else mean / 2)
        slope = (n * products - tokens * ns) / spread
        fixed = (ns - slope * tokens) / n
        if slope <= 0:
            return int(2 * tokens / n) if ns / n < self._target_ns else int(tokens / n / 2)
        return int(max(0.0, (self._target_ns - fixed) / slope))
