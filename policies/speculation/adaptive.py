"""As many guesses as pay for themselves, by how many were right lately and what verified tokens cost here."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Ints, Observed, PolicyOptions, Running, Step

_FIRST_HOPE = 0.5
_WEIGHT = 2
"""How many guesses of its own outweigh what is hoped for a sequence."""
_LEARNT = 1 / 16
"""How much each judged guess changes what is hoped for new sequences."""
_DEEPER = 1 / 8
"""How much each look at drafts changes what is known of their shape."""
_ROUNDING = 1e-6
_GAIN = 1.03
"""Guesses must make a step's tokens so much cheaper: less is lost again in finding them."""
_WRONG = 8
"""So many wrong guesses double the time to the next try,"""
_LONGEST = 3
"""but no more often than this."""


class Adaptive:
    """Guesses of a sequence are right with probability a for each place, by its own latest ones and at first by those
    of others; so k of them yield (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., ICML 2023). Where they are trees, k
    guesses are for d k places, and d is learnt: each then gains d as much, and costs a token as any other. What a step
    of t tokens takes is learnt from the steps seen, see `Costs`. The gains of all sequences' guesses, best first, are
    taken as far as tokens per time are most, and only if that is 3 % more than without guesses; what a step without any
    takes is seen anew every 32 steps, by making one.

    A sequence whose guesses do not pay gets none, but for one now and then: first after `probe_steps`, then after
    longer and longer as that one is wrong too (up to 8 times as long). So it is off after 5 steps of wrong guesses
    where a token costs 10 % of a step, and after 13 where it costs nothing. The more sequences run, the nearer to
    certain a guess must be; with 128 of them not even one that is right four times in five is made, nor tried now and
    then.
    """

    class Options(PolicyOptions, frozen=True):
        most: Annotated[int, msgspec.Meta(ge=0, le=64)] = 16
        token_cost: Annotated[float, msgspec.Meta(ge=0)] = 0.1
        """Time of a further token as a part of a step's, until steps were measured."""
        probe_steps: Annotated[int, msgspec.Meta(ge=1)] = 64
        """A sequence without guesses tries one every so many steps."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._costs = Costs(options.token_cost)
        self._hope = _FIRST_HOPE
        self._deep = 1.0
        """Places that a guess is for: 1 in chains, less where a tree has several for the same one."""
        self._numbers = np.arange(1, options.most + 1)

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        most = self._options.most
        decoding = running.decoding
        room = np.where(decoding, np.clip(running.output_left - 1, 0, most), 0)
        if not room.any():
            return room.astype(np.int32)
        right = (running.right + self._hope * _WEIGHT) / (running.judged + _WEIGHT)
        tokens = int(decoding.sum())
        paid = self._costs.relative(tokens, room.size * most) * tokens
        lengths = self._worth(right, room, tokens, paid)
        if (tokens + _FIRST_HOPE) / paid[1] > 1.0:  # one that is right would pay
            quiet = np.flatnonzero(lengths == 0)
            wrong = (running.judged - running.right)[quiet] // _WRONG
            every = self._options.probe_steps << np.minimum(wrong, _LONGEST)
            lengths[quiet[(step.step + running.prompt[quiet]) % every == 0]] = 1
        return np.minimum(lengths, room).astype(np.int32)

    def _worth(self, right: Floats, room: Ints, tokens: int, paid: Floats) -> Ints:
        """How many guesses of each pay together; `paid` is what 0, 1, … of them all take, per token without any."""
        surest = float(right[room > 0].max())
        if float(((tokens + surest * np.arange(len(paid))) / paid).max()) < _GAIN:
            return np.zeros(len(room), dtype=np.int32)
        gains: Floats = self._deep * right[:, None] ** np.ceil(self._numbers * self._deep - _ROUNDING)
        gains[self._numbers > room[:, None]] = 0.0
        order = np.argsort(-gains, axis=None, kind="stable")
        rates = (tokens + np.concatenate([[0.0], np.cumsum(gains.ravel()[order])])) / paid
        best = int(np.argmax(rates))
        if rates[best] < _GAIN or not self._costs.fresh(tokens):
            best = 0
        taken = order[:best]
        return np.bincount(taken // len(self._numbers), minlength=len(room)).astype(np.int32)

    def observe(self, observed: Observed) -> None:
        drafted, accepted = int(observed.drafted.sum()), int(observed.accepted.sum())
        if drafted:
            depth = int(observed.depth.sum()) or drafted
            self._deep += (depth / drafted - self._deep) * _DEEPER
            # What comes after a wrong guess was not judged: of a draft with j right ones, j + 1 were.
            judged = min(depth, accepted + int(observed.decodes[observed.drafted > 0].sum()))
            self._hope += (accepted / max(1, judged) - self._hope) * (1 - (1 - _LEARNT) ** judged)
        for prefill, decodes, more, took in zip(
            observed.prefill_tokens.tolist(), observed.decodes.tolist(), observed.drafted.tolist(),
            observed.duration_ns.tolist(), strict=True,
        ):  # fmt: skip
            if prefill or not decodes:  # a chunk's tokens cost less than guesses: attention is shared
                self._costs.interrupted()
            else:
                self._costs.learn(decodes + more, took)


_SIZES = np.array([*range(1, 17), *(2**i * j // 4 for i in range(4, 10) for j in range(5, 9))])
"""Tokens of a step that are told apart; a step between two of them is like the nearer one."""
_OF = np.abs(np.arange(_SIZES[-1] + 1)[:, None] - _SIZES).argmin(1)
_KEPT = 64
"""Answers that are kept until something is learnt."""
_STEP = 0.05
"""Least part of a surprise that is learnt; more while little was seen."""
_FEW, _WIDE, _WIDEST = 4, 1.5, 0.25
"""Most of a surprise that counts, in logarithms: while few steps of a size were seen, and then, when a greater one
tells of what else held the machine."""
_AGE = 32
"""Steps after which one without guesses is made, to know what guesses are compared with."""
_APART = 8
"""So many steps may lie between two that are compared."""


class Costs:
    """How much longer a step of so many tokens takes than one of fewer.

    Learnt from ratios of steps near each other in time, never from a time alone: what slows the machine for a while
    slows both of a pair. Of the ratios to the latest step of each other size the middle one counts. Sizes not seen are
    between those that were, in the first guess's proportions."""

    def __init__(self, token_cost: float) -> None:
        self._first: Floats = np.log(1.0 + token_cost * _SIZES)
        self._off: Floats = np.zeros(len(_SIZES))
        """What is added to the first guess."""
        self._seen = [0] * len(_SIZES)
        self._known: Floats = self._first
        self._last: dict[int, tuple[int, float]] = {}
        """Of the latest sizes: the step, and the logarithm of its time."""
        self._steps = 0
        self._at: dict[int, int] = {}
        """The step that was last of a size."""
        self._said: dict[tuple[int, int], Floats] = {}
        """What `relative` said since something was learnt."""

    def relative(self, tokens: int, more: int) -> Floats:
        """What steps of tokens, tokens + 1, …, tokens + more take, over what the first of them does."""
        if (said := self._said.get((tokens, more))) is not None:
            return said
        sizes = np.arange(tokens, tokens + more + 1)
        known = np.interp(sizes, _SIZES, self._known)
        beyond = sizes > _SIZES[-1]
        if beyond.any():
            known[beyond] += np.log(sizes[beyond] / _SIZES[-1])
        if len(self._said) >= _KEPT:
            self._said.clear()
        paid: Floats = np.exp(known - known[0])
        self._said[tokens, more] = paid
        return paid

    def fresh(self, tokens: int) -> bool:
        """Whether a step of so many was seen lately, or none at all."""
        return self._steps - self._at.get(self._size(tokens), 0) < _AGE

    def interrupted(self) -> None:
        """A step of another kind came between."""
        self._steps += 1

    def learn(self, tokens: int, took_ns: int) -> None:
        self._steps += 1
        here, now = self._size(tokens), float(np.log(max(1, took_ns)))
        self._at[here] = self._steps
        surprises = []
        for there, (at, then) in list(self._last.items()):
            if self._steps - at > _APART:
                del self._last[there]
            elif there != here:
                expected = self._first[here] + self._off[here] - self._first[there] - self._off[there]
                surprises.append(now - then - expected)
        self._last[here] = self._steps, now
        if not surprises:
            return
        widest = _WIDEST if self._seen[here] >= _FEW else _WIDE
        surprise = min(max(sorted(surprises)[len(surprises) // 2], -widest), widest)
        self._off[here] += surprise * max(_STEP, 1 / (1 + self._seen[here]))
        self._seen[here] += 1
        seen = np.flatnonzero(self._seen)
        self._known = self._first + np.interp(_SIZES, _SIZES[seen], self._off[seen])
        self._said.clear()

    @staticmethod
    def _size(tokens: int) -> int:
        return int(_OF[min(tokens, len(_OF) - 1)])
