"""As many guesses as pay for themselves, by how many were right lately and what verified tokens cost here."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Ints, Mask, Observed, PolicyOptions, Running, Step
from octavo.policies.speculation.costs import LONG, Costs

_FIRST_HOPE = 0.5
_WEIGHT = 2
"""How many guesses of its own outweigh what is hoped for a sequence."""
_LEARNT = 1 / 16
"""How much each judged guess changes what is hoped for new sequences."""
_DEEPER = 1 / 8
"""How much each look at drafts changes what is known of their shape."""
_LEAST_FOUND = 1 / 8
"""A drafter that finds nothing for long is asked on as if it found so many: where few run, asking is free."""
_ROUNDING = 1e-6
_GAIN = 1.03
"""Guesses must make a step's tokens so much cheaper: less is lost again in finding them."""
_WRONG = 8
"""So many wrong guesses double the time to the next try,"""
_LONGEST = 3
"""but no more often than this."""
_LATELY, _TRUSTED, _FORGIVEN = 1 / 16, 8.0, 1 / 64
"""How much each step with guesses takes from what is known of those before; how many right ones are taken for granted;
and how much of a disappointment each step without guesses takes away."""
_CANDIDATES, _FEW_PLACES = 128, 2
"""So many guesses are weighed in a step, but two of each sequence: of many no deep ones pay."""
_FIRST_LOOK = 4
"""Steps to the first look at unknown costs."""
_BARE = 16
"""Steps until a step that was made without guesses, to be seen, must have been told of: else another is made."""
_REST = 16
"""After a step in which nothing paid so many pass before it is asked again what would, unless others decode."""


class Adaptive:
    """Guesses of a sequence are right with probability a for each place, by its own latest ones and at first by those
    of others; so k of them yield (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., ICML 2023). Where they are trees, k
    guesses are for d k places, and d is learnt: each then gains d as much, and costs a token as any other. What a step
    of t tokens takes is learnt from the steps seen, see `Costs`. The gains of all sequences' guesses, best first, are
    taken as far as tokens per time are most, and only if that is 3 % more than without guesses; what a step without any
    takes is seen anew every 32 steps, by making one.

    Sequences whose guesses do not pay get none, but for one now and then, all in the same step: where many run, the
    first guess of a step is the dearest. That is tried every `probe_steps` steps, if it would pay were half of them
    right; a sequence that has been wrong often takes part less and less (down to every eighth time). So it is off after
    5 steps of wrong guesses where a token costs 10 % of a step, and after 13 where it costs nothing. What such a step
    takes is not known at first: it is made twice to see, after 4 steps and then after longer and longer. Where fewer
    guesses were right lately than were hoped for, fewer are hoped for. After a step in which nothing paid what would is
    asked again 16 steps later, or when others decode.

    The more sequences run, the nearer to certain a guess must be, unless a step of more tokens was seen to take little
    longer: with 128 of them not even one that is right four times in five is made unseen.
    """

    class Options(PolicyOptions, frozen=True):
        most: Annotated[int, msgspec.Meta(ge=0, le=64)] = 16
        token_cost: Annotated[float, msgspec.Meta(ge=0)] = 0.1
        """Time of a further token as a part of a step's, until steps were measured."""
        probe_steps: Annotated[int, msgspec.Meta(ge=1)] = 64
        """A sequence without guesses tries one every so many of its tokens."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._probe = options.probe_steps
        """The same in steps that are planned, which are of several rounds lately."""
        self._costs = Costs(options.token_cost)
        self._hope = _FIRST_HOPE
        self._deep = 1.0
        """Places that a guess is for: 1 in chains, less where a tree has several for the same one."""
        self._found = 1.0
        """Of guesses that drafters were asked for, the part that they made."""
        self._promised = self._kept = 0.0
        """Right guesses that were hoped for lately, and that there were."""
        self._look, self._looks_apart = _FIRST_LOOK, _FIRST_LOOK
        """From which step on (as `Costs` counts) unknown costs are looked at, and after how many again."""
        self._bared = 0, 0
        """How many decoded in the last step that was made without guesses to be seen, and up to which it is enough."""
        self._resting, self._until = (0, 0), 0
        """Of whom nothing paid (how many decoded, when the youngest came), and up to which step they get nothing."""

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        lengths = np.zeros(len(running), dtype=np.int32)
        tokens, steps = int(np.count_nonzero(running.decoding)), self._costs.steps
        crowd = tokens, int(running.arrival_ns[-1]) if tokens else 0
        if crowd == self._resting and steps < self._until and step.step % self._probe:
            return lengths
        room = np.where(running.decoding, np.minimum(running.output_left - 1, self._options.most), 0)
        able = np.flatnonzero(room > 0)
        if not len(able) or self._bare(step, tokens):
            return lengths
        judged, right = running.judged[able], running.right[able]
        chance = (right + self._hope * _WEIGHT) / (judged + _WEIGHT)
        given, hoped_for = self._worth(room[able], chance, tokens)
        lengths[able] = given
        tried = quiet = np.flatnonzero(given == 0)
        if len(quiet):
            tried = quiet[self._tried(step, (judged - right)[quiet], tokens)]
            lengths[able[tried]] = 1
        if hoped_for or len(tried):
            self._promised += hoped_for + self._found * float(chance[tried].sum()) - self._promised * _LATELY
        else:
            self._resting = crowd
            self._until = min(steps + _REST, self._look) if steps < self._look else steps + _REST
        return lengths

    def _bare(self, step: Step, tokens: int) -> bool:
        """Whether this step is made without guesses, to see what that takes: one, although the next are planned before
        it is told of."""
        if self._costs.fresh(tokens) or (self._bared[0] == tokens and step.step < self._bared[1]):
            return False
        self._bared = tokens, step.step + _BARE
        return True

    def _worth(self, room: Ints, chance: Floats, tokens: int) -> tuple[Ints, float]:
        """Of sequences that may get `room` guesses, each right by `chance`: how many pay together, and how many of all
        are hoped to be right."""
        found, deep = self._found, self._deep
        kept = min(1.0, (self._kept + _TRUSTED) / (self._promised + _TRUSTED))
        places = min(self._options.most, max(_FEW_PLACES, _CANDIDATES // len(room)))
        sizes = self._costs.ends(tokens, int(np.minimum(room, places).sum()))
        # How likely anybody has a guess: without any the step costs nothing.
        some = [1.0 - (1.0 - found) ** min(more, len(room)) for more in sizes]
        made = [math.ceil(found * more / likely - _ROUNDING) for more, likely in zip(sizes, some, strict=True)]
        paid = self._costs.paid(tokens, made)
        taking = [tokens * (1.0 + likely * (dearer - 1.0)) for likely, dearer in zip(some, paid, strict=True)]
        best, best_rate, surest = 0, _GAIN, kept * found * float(chance.max())
        if all(tokens + surest * more < best_rate * took for more, took in zip(sizes, taking, strict=True)):
            return np.zeros(len(room), dtype=np.int32), 0.0
        levels = np.ceil(deep * np.arange(1, places + 1) - _ROUNDING)
        gains = deep * chance[:, None] ** levels
        gains[np.arange(places) >= room[:, None]] = -1.0  # never taken: all others come before
        order = np.argsort(-gains, axis=None, kind="stable")
        right = (found * np.cumsum(gains.ravel()[order])).tolist()
        for more, took in zip(sizes, taking, strict=True):
            rate = (tokens + kept * right[more - 1]) / took
            if rate > best_rate:
                best, best_rate = more, rate
        given = np.bincount(order[:best] // places, minlength=len(room)).astype(np.int32)
        return given, right[best - 1] if best else 0.0

    def _tried(self, step: Step, wrong: Ints, tokens: int) -> Mask:
        """Which of the quiet ones, of whose latest guesses so many were wrong, get a guess now."""
        all_, n = np.ones(len(wrong), dtype=np.bool_), len(wrong)
        some = math.ceil(self._found * n / 2)
        if n and self._costs.steps >= self._look and not self._costs.known(tokens + some):
            self._looks_apart = min(2 * self._looks_apart, LONG)
            self._look = self._costs.steps + self._looks_apart
            return all_
        probe = self._probe
        if step.step % probe:
            return ~all_
        due: Mask = step.step % (probe << np.minimum(wrong // _WRONG, _LONGEST)) == 0
        n = int(np.count_nonzero(due))
        pays = tokens + n * _FIRST_HOPE > tokens * self._costs.paid(tokens, [n])[0]
        return due if pays else ~all_

    def observe(self, observed: Observed) -> None:
        drafted, asked = observed.drafted.tolist(), sum(observed.asked.tolist())
        decodes, made = observed.decodes.tolist(), sum(drafted)
        columns = observed.asked.tolist(), observed.accepted.tolist(), observed.rounds.tolist()
        for wanted, right, rounds in zip(*columns, strict=True):
            if wanted:
                self._kept += right - self._kept * _LATELY
            else:
                self._promised += (self._kept - self._promised) * _FORGIVEN
                self._probe = max(1, self._options.probe_steps // rounds)
        if asked:
            self._found += (made / asked - self._found) * (1 - (1 - _LEARNT) ** asked)
            self._found = max(self._found, _LEAST_FOUND)
        if made:
            depth, accepted = sum(observed.depth.tolist()) or made, sum(observed.accepted.tolist())
            self._deep += (depth / made - self._deep) * _DEEPER
            # What comes after a wrong guess was not judged: of a draft with j right ones, j + 1 were.
            drafts = sum(n for n, more in zip(decodes, drafted, strict=True) if more)
            judged = min(depth, accepted + drafts)
            self._hope += (accepted / max(1, judged) - self._hope) * (1 - (1 - _LEARNT) ** judged)
        steps = observed.prefill_tokens.tolist(), decodes, drafted, observed.duration_ns.tolist()
        for prefill, n, more, took in zip(*steps, strict=True):
            if prefill or not n:  # a chunk's tokens cost less than guesses: attention is shared
                self._costs.interrupted()
            else:
                self._costs.learn(n, more, took)
