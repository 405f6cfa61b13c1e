"""As many guesses as pay for themselves, by how many were right lately and what verified tokens cost here."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Ints, Mask, Observed, PolicyOptions, Running, Step

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
    takes is not known at first: it is made twice to see, after 4 steps and then after longer and longer.

    The more sequences run, the nearer to certain a guess must be, unless a step of more tokens was seen to take little
    longer: with 128 of them not even one that is right four times in five is made unseen.
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
        self._found = 1.0
        """Of guesses that drafters were asked for, the part that they made."""
        self._numbers = np.arange(1, options.most + 1)
        self._look, self._looks_apart = _FIRST_LOOK, _FIRST_LOOK
        """From which step on (as `Costs` counts) unknown costs are looked at, and after how many again."""

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        room = np.where(running.decoding, np.clip(running.output_left - 1, 0, self._options.most), 0)
        tokens, most = int(running.decoding.sum()), int(room.sum())
        if not most or not self._costs.fresh(tokens):
            return np.zeros(len(room), dtype=np.int32)
        right = (running.right + self._hope * _WEIGHT) / (running.judged + _WEIGHT)
        lengths = self._worth(right, room, tokens, most)
        quiet = (lengths == 0) & (room > 0)
        if quiet.any():
            lengths[self._tried(step, running, quiet, tokens)] = 1
        return lengths

    def _worth(self, right: Floats, room: Ints, tokens: int, most: int) -> Ints:
        """How many guesses of each pay together."""
        more, found = self._costs.ends(tokens, most), self._found
        some = 1.0 - (1.0 - found) ** np.minimum(more, int((room > 0).sum()))
        """How likely anybody has a guess: without any the step costs nothing."""
        dearer = self._costs.paid(tokens, np.ceil(found * more / some - _ROUNDING).astype(np.int32)) - 1.0
        taking = tokens * (1.0 + some * dearer)
        surest = float(right[room > 0].max())
        if float(((tokens + found * surest * more) / taking).max()) < _GAIN:
            return np.zeros(len(room), dtype=np.int32)
        gains: Floats = self._deep * right[:, None] ** np.ceil(self._numbers * self._deep - _ROUNDING)
        gains[self._numbers > room[:, None]] = -1.0  # after all others, even where nothing is hoped for
        order = np.argsort(-gains, axis=None, kind="stable")
        rates = (tokens + found * np.cumsum(gains.ravel()[order])[more - 1]) / taking
        best = int(np.argmax(rates))
        taken = order[: more[best] if rates[best] >= _GAIN else 0]
        return np.bincount(taken // len(self._numbers), minlength=len(room)).astype(np.int32)

    def _tried(self, step: Step, running: Running, quiet: Mask, tokens: int) -> Mask:
        """Which of the quiet ones get a guess now."""
        n = int(quiet.sum())
        if self._costs.steps >= self._look and not self._costs.known(tokens + (n + 1) // 2):
            self._looks_apart = min(2 * self._looks_apart, _LONG)
            self._look = self._costs.steps + self._looks_apart
            return quiet
        if step.step % self._options.probe_steps:
            return np.zeros_like(quiet)
        wrong = (running.judged - running.right) // _WRONG
        due: Mask = quiet & (step.step % (self._options.probe_steps << np.minimum(wrong, _LONGEST)) == 0)
        n = int(due.sum())
        paid = float(self._costs.paid(tokens, np.array([n], dtype=np.int32))[0])
        return due if tokens + n * _FIRST_HOPE > tokens * paid else np.zeros_like(quiet)

    def observe(self, observed: Observed) -> None:
        drafted, accepted, asked = (int(c.sum()) for c in (observed.drafted, observed.accepted, observed.asked))
        if asked:
            self._found += (drafted / asked - self._found) * (1 - (1 - _LEARNT) ** asked)
            self._found = max(self._found, _LEAST_FOUND)
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
"""Tokens of a step that are told apart; one between two of them is like the greater: executors compute in tiles."""
_OF = np.searchsorted(_SIZES, np.arange(_SIZES[-1] + 1))
_STEP = 0.05
"""Least part of a surprise that is learnt; more while little was seen."""
_FEW, _WIDE, _WIDEST = 4, 1.5, 0.25
"""Most of a surprise that counts, in logarithms: while few steps of a size were seen, and then, when a greater one
tells of what else held the machine."""
_AGE = 32
"""Steps after which one without guesses is made, to know what guesses are compared with."""
_APART = 8
"""So many steps may lie between two that are compared."""
_FIRST_LOOK, _LONG = 4, 512
"""Steps to the first look at unknown costs, and after which a size's are unknown again."""


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
        self.steps = 0
        """Seen so far, of decodes alone."""
        self._now = 0
        """The number of the latest step of any kind."""
        self._at: dict[int, int] = {}
        """The step that was last of a size."""

    def ends(self, tokens: int, most: int) -> Ints:
        """Numbers of further tokens, from 1 to `most`, of which a greater one makes a step of another size."""
        end = min(tokens + most, int(_SIZES[-1]))
        if tokens >= end:
            return np.ones(1, dtype=np.int32)
        sizes: Ints = _SIZES[_OF[tokens + 1] : _OF[end] + 1]
        return np.minimum(sizes, end) - tokens

    def paid(self, tokens: int, more: Ints) -> Floats:
        """What steps of so many more than `tokens` take over what one of `tokens` does."""
        beyond = np.maximum(1.0, (tokens + more) / max(tokens, _SIZES[-1]))
        known = self._known[_OF[np.minimum(tokens + more, _SIZES[-1])]]
        paid: Floats = np.exp(known - np.interp(tokens, _SIZES, self._known)) * beyond
        return paid

    def fresh(self, tokens: int) -> bool:
        """Whether a step of so many was seen lately, or none at all."""
        return self.steps - self._at.get(self._size(tokens), 0) < _AGE

    def known(self, tokens: int) -> bool:
        """Whether steps of so many or more were seen, not too long ago and not only one: that may have been slow."""
        least = self._size(tokens)
        lately = [size for size, at in self._at.items() if size >= least and self.steps - at < _LONG]
        return sum(self._seen[size] for size in lately) > 1

    def interrupted(self) -> None:
        """A step of another kind came between."""
        self._now += 1

    def learn(self, tokens: int, took_ns: int) -> None:
        self.steps += 1
        self._now += 1
        here, now = self._size(tokens), float(np.log(max(1, took_ns)))
        self._at[here] = self.steps
        surprises = []
        for there, (at, then) in list(self._last.items()):
            if self._now - at > _APART:
                del self._last[there]
            elif there != here:
                expected = self._first[here] + self._off[here] - self._first[there] - self._off[there]
                surprises.append(now - then - expected)
        self._last[here] = self._now, now
        if not surprises:
            return
        few = self._seen[here] < _FEW
        widest = _WIDE if few else _WIDEST
        surprise = min(max(sorted(surprises)[len(surprises) // 2], -widest), widest)
        # Of few the quickest counts: what is thought too dear is not made again, and so never seen to be cheap.
        self._off[here] += surprise * (1.0 if few and surprise < 0 else max(_STEP, 1 / (1 + self._seen[here])))
        self._seen[here] += 1
        seen = np.flatnonzero(self._seen)
        self._known = self._first + np.interp(_SIZES, _SIZES[seen], self._off[seen])

    @staticmethod
    def _size(tokens: int) -> int:
        return int(_OF[min(tokens, len(_OF) - 1)])
