"""As many guesses as pay for themselves, by how many were right lately and what a verified token costs here."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Ints, Observed, PolicyOptions, Running, Step

_FIRST_HOPE = 0.6
_WEIGHT = 2
"""How many guesses of its own outweigh what is hoped for a sequence."""
_LEARNT = 1 / 16
"""How much each judged guess changes what is hoped for new sequences."""
_DECAY = 0.98
"""Of what is known of steps' times, at each step: about fifty of them count."""
_FEW = 8
_LEAST = 0.01
"""Least slope that is believed: so a guess must be right once in a hundred times, whatever was measured."""


class Adaptive:
    """Guesses of a sequence are right with probability a each, by its own latest ones and at first by those of others;
    so k of them yield (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., ICML 2023). A step of t tokens takes
    1 + slope * t, in units of what it takes anyhow; the slope is fitted to the steps seen. The gains a^k of all
    sequences' k-th guesses, best first, are taken while tokens per time grow.

    A sequence whose guesses do not pay gets none, but for one now and then (`probe_steps`): that is after 7 wrong ones
    in a row where a token costs 10 % of a step, and after 24 wherever. The more sequences run, the nearer to certain a
    guess must be; with 128 of them not even one that is right four times in five is made, nor tried now and then.
    """

    class Options(PolicyOptions, frozen=True):
        most: Annotated[int, msgspec.Meta(ge=0, le=64)] = 8
        token_cost: Annotated[float, msgspec.Meta(ge=0)] = 0.1
        """Time of a further token as a part of a step's, until steps were measured."""
        probe_steps: Annotated[int, msgspec.Meta(ge=1)] = 64
        """A sequence without guesses tries one every so many steps."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._cost = _Cost(options.token_cost)
        self._hope = _FIRST_HOPE

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        most = self._options.most
        decoding = running.decoding
        room = np.where(decoding, np.clip(running.output_left - 1, 0, most), 0)
        if not room.any():
            return room.astype(np.int32)
        right = (running.right + self._hope * _WEIGHT) / (running.judged + _WEIGHT)
        gains: Floats = right[:, None] ** np.arange(1, most + 1)
        gains[np.arange(1, most + 1) > room[:, None]] = 0.0
        order = np.argsort(-gains, axis=None, kind="stable")
        tokens = int(decoding.sum())
        yields = tokens + np.concatenate([[0.0], np.cumsum(gains.ravel()[order])])
        times = 1.0 + self._cost.slope * (tokens + np.arange(len(yields)))
        taken = order[: int(np.argmax(yields / times))]
        lengths = np.bincount(taken // max(most, 1), minlength=len(room))
        if (tokens + _FIRST_HOPE) * times[0] > tokens * times[1]:  # one that is right would pay
            probes = (step.step + running.prompt) % self._options.probe_steps == 0
            lengths[(lengths == 0) & probes] = 1
        return np.minimum(lengths, room).astype(np.int32)

    def observe(self, observed: Observed) -> None:
        drafted, accepted = int(observed.drafted.sum()), int(observed.accepted.sum())
        if drafted:
            # What comes after a wrong guess was not judged: of a draft with j right ones, j + 1 were.
            judged = min(drafted, accepted + int(observed.decodes[observed.drafted > 0].sum()))
            self._hope += (accepted / max(1, judged) - self._hope) * (1 - (1 - _LEARNT) ** judged)
        tokens = observed.prefill_tokens + observed.decodes + observed.drafted
        plain = observed.prefill_tokens == 0  # a chunk's tokens cost less than guesses: attention is shared
        self._cost.learn(tokens[plain].astype(np.float64), observed.duration_ns[plain].astype(np.float64))


class _Cost:
    """Time of a step as a line over its tokens, by decaying least squares; `slope` is in units of the line's start."""

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self._sums = np.zeros(5)
        """Of weights, tokens, times, tokens squared, tokens × times."""

    def learn(self, tokens: Floats, times: Floats) -> None:
        for t, d in zip(tokens.tolist(), times.tolist(), strict=True):
            weight, _, total, _, _ = self._sums.tolist()
            if weight >= _FEW:
                d = min(d, 4 * total / weight)  # something else held the machine
            self._sums = self._sums * _DECAY + np.array((1.0, t, d, t * t, t * d))
        weight, t, d, tt, td = self._sums.tolist()
        spread = weight * tt - t * t
        if weight < _FEW or spread < 0.05 * weight * weight:  # all alike: any line goes through one point
            return
        slope = (weight * td - t * d) / spread
        start = (d - slope * t) / weight
        self.slope = max(_LEAST, slope / start) if start > 0 else np.inf
