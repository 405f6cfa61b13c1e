"""Which guesses are right. The only place that decides it, for every executor and every drafter.

A pass over a sequence's last token and its k guesses gives k + 1 rows of logits; each row is what the target says after
the guesses before it, and means something only if all of those were right. So tokens are taken row by row, each with
the whole sequence so far for context (penalties, grammar, bans, `min_tokens`), until one is not the guess. In a tree of
guesses the next row is that of the guess that was right (SpecInfer, Miao et al., ASPLOS 2024), until none is.

- `coupled`: the token at a position is the sampler's own: greedy, or Gumbel-max with noise of (seed, choice, position).
  A guess is right iff it is that token. So the answer is bit for bit the one without guesses, whatever was guessed, how
  far, and in which step.
- `rejection`: a guess x, drawn from q, is taken with probability min(1, p(x) / q(x)); else the token is drawn from the
  normalised positive part of p - q (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML
  2023; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023). Of several guesses
  for one place each is judged so, against what the rejection of those before it left of p (multi-round, as in
  SpecInfer). Each token's distribution is p, the target's with all sampler options; which token it is depends on the
  guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.grammar import Mask
from octavo.executors.drafting.contract import Draft
from octavo.executors.drafting.tree import child, children
from octavo.executors.philox import Purpose, uniforms
from octavo.executors.sampling import Context, Ids, Logits, Reals, distribution, draw, sample

Rule: TypeAlias = Literal["coupled", "rejection"]
Masks: TypeAlias = Callable[[Sequence[int]], Mask | None]
"""What the grammar allows after these new tokens."""
Sampler: TypeAlias = Callable[[Logits, Context], int]
"""`executors.sampling.sample`, or what gives the same tokens."""


def no_grammar(new: Sequence[int]) -> Mask | None:
    return None


def verify(
    rows: Sequence[Logits] | npt.NDArray[np.float32],
    draft: Draft,
    context: Context,
    rule: Rule = "coupled",
    mask: Masks = no_grammar,
    sampler: Sampler = sample,
) -> list[int]:
    """The tokens that the rows yield, from 1 to as many as rows; `tree.path` says which guesses they took. `rows[0]`
    are the target's logits without guesses, `rows[1 + i]` those after guess i and all before it; where there are fewer
    rows than guesses, the rest of the guesses is not looked at. `context.ids` is the sequence without guesses; its mask
    is not read."""

    def say(row: int, new: list[int]) -> int:
        here = context._replace(ids=[*context.ids, *new] if new else context.ids, mask=mask(new))
        guesses = children(draft, row - 1)
        if rule == "coupled" or not guesses:
            return sampler(rows[row], here)
        asked = [(draft.tokens[i], None if draft.chances is None else draft.chances[i]) for i in guesses]
        return judge(rows[row], here, asked)

    return walk(len(rows), draft, say)


def walk(rows: int, draft: Draft, say: Callable[[int, list[int]], int]) -> list[int]:
    """`say` gives the token of a row, from the tokens before it that are new; from there it goes on with the row of the
    guess that is that token, until none is or it is not among the first so many rows."""
    new: list[int] = []
    node: int | None = -1
    while node is not None and node + 1 < rows:
        new.append(say(node + 1, new))
        node = child(draft, node, new[-1])
    return new


def judge(row: Logits, context: Context, guesses: Sequence[tuple[int, Reals | None]]) -> int:
    """The rule `rejection` at one position: the first of the guesses (each with the distribution that it was drawn
    from) that is taken, or another token in their place."""
    if context.sampling.temperature == 0:
        return sample(row, context)
    ids, scores = distribution(row, context)
    sampling, position = context.sampling, len(context.ids)
    rounds = np.arange(len(guesses), dtype=np.int64)
    lots = uniforms(rounds, sampling.seed, context.choice, position, Purpose.ACCEPT).tolist()
    rest: Reals = np.exp(scores)
    for (guess, chances), lot in zip(guesses, lots, strict=True):
        left = remaining(ids, rest, guess, chances, lot)
        if left is None:
            return guess
        rest = left
    with np.errstate(divide="ignore"):
        return draw(ids, np.log(rest), context, Purpose.RESAMPLE)


def remaining(ids: Ids, weights: Reals, guess: int, chances: Reals | None, lot: float) -> Reals | None:
    """None if the guess is taken; else the weights of `ids` from which another is drawn.

    `weights` are p up to a factor, `chances` [vocab] is q (None: the guess was certain), `lot` is uniform in (0, 1)."""
    p: Reals = weights / weights.sum()
    q: Reals = (ids == guess).astype(np.float64) if chances is None else chances[ids]
    mine = ids == guess
    if lot * (1.0 if chances is None else float(chances[guess])) < float(p[mine].sum()):
        return None
    rest: Reals = np.maximum(p - q, 0.0)
    if rest.sum() > 0.0:
        return rest
    return p  # p and q are equal but for rounding: this has no probability
