"""As many drafts as pay for themselves, by how many were right lately and how busy the engine is."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Ints, Observed, PolicyOptions, Running, Step


class Adaptive:
    """With each draft right with probability a, k drafts yield (1 - a^(k+1)) / (1 - a) tokens a step (Leviathan et
    al., ICML 2023). A step of n sequences with k drafts each costs 1 + (n (1 + k) beyond `free` tokens) ×
    `token_cost`. The k with the most yield per cost is taken; where none pays, drafting stops, but for a probe now and
    then."""

    class Options(PolicyOptions, frozen=True):
        most: Annotated[int, msgspec.Meta(ge=0, le=64)] = 8
        free: Annotated[int, msgspec.Meta(ge=0)] = 16
        """Tokens that a step computes at no extra time, since it waits for the weights anyway."""
        token_cost: Annotated[float, msgspec.Meta(ge=0)] = 0.05
        """Time of each further token, as a part of a step's."""
        probe_steps: Annotated[int, msgspec.Meta(ge=1)] = 50
        """While off, one draft each is tried every so many steps."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._right = 0.7
        """Probability that a draft is right, by a decaying mean."""

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        options, sequences = self._options, int(running.decoding.sum())
        k = np.arange(options.most + 1)
        tokens = (1 - self._right ** (k + 1)) / (1 - self._right)
        cost = 1 + options.token_cost * np.maximum(0, sequences * (1 + k) - options.free)
        best = int(np.argmax(tokens / cost))
        if best == 0 and step.step % options.probe_steps == 0:
            best = min(1, options.most)
        return np.where(running.decoding, np.clip(running.output_left - 1, 0, best), 0).astype(np.int32)

    def observe(self, observed: Observed) -> None:
        drafted, accepted = int(observed.drafted.sum()), int(observed.accepted.sum())
        if drafted:
            # Drafts after a wrong one do not count as wrong themselves: of k drafts with j right, j + 1 were judged.
            judged = min(drafted, accepted + int(observed.decodes[observed.drafted > 0].sum()))
            weight = min(0.5, judged / 64)
            self._right += weight * (min(0.99, accepted / max(1, judged)) - self._right)
