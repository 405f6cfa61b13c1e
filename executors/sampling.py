"""From a row of logits to a token. A function of the row, the sequence so far and its seed, never of the batch.

The order of what may change a distribution, each step working on what the former left:

    repetition → presence, frequency → bias → bans → temperature → top-k → top-p → min-p → typical → draw

Ties are broken towards the lowest id everywhere: the k-th of equal logits, the greedy token, the best alternatives.
The draw is Gumbel-max with noise that belongs to (seed, choice, position, id), so a token keeps its noise whatever
else is in the running. Rows are worked on one by one in float64; only those that ask for more than the best token pay.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.core.grammar import Mask
from octavo.core.messages import Sampling, TokenLogprob
from octavo.executors.philox import Purpose, uniforms

Ids: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]
Logits: TypeAlias = npt.NDArray[np.float32]
"""The model's logits of one position, shape [vocab]."""

LEAST_LOGPROB = -9999.0
_LIKELY = 1024
"""Top-p looks among this many of the most likely tokens first; sorting a whole vocabulary takes milliseconds."""


class Context(NamedTuple):
    """What a draw depends on beside the logits. `ids` is the sequence so far, of which the first `prompt_len` are
    the prompt; the token that is drawn gets position len(ids)."""

    sampling: Sampling
    choice: int
    prompt_len: int
    ids: list[int]
    mask: Mask | None = None
    """What its grammar lets come next, if it has one."""


def sample(logits: Logits, context: Context) -> int:
    """The next token's id. `logits` must be finite."""
    sampling = context.sampling
    if sampling.temperature == 0 and context.mask is None and not shaped(sampling):
        return int(logits.argmax())
    if sampling.temperature == 0:
        return int(restrict(penalise(logits.astype(np.float64), context), context).argmax())
    return draw(*distribution(logits, context), context)


def distribution(logits: Logits, context: Context) -> tuple[Ids, Reals]:
    """The ids that are in the running, in order, and their log-probabilities up to a constant. Not for greedy."""
    return running(restrict(penalise(logits.astype(np.float64), context), context), context.sampling)


def running(scores: Reals, sampling: Sampling) -> tuple[Ids, Reals]:
    """The same of scores that penalties and bans are in already; one of them at least is finite."""
    with np.errstate(over="ignore"):  # a tiny temperature may take scores to infinity: the difference below stays right
        scores = np.maximum((scores - scores.max()) / sampling.temperature, -1e300)
    ids = keep(scores, sampling)
    return ids, scores[ids]


def draw(ids: Ids, scores: Reals, context: Context, purpose: Purpose = Purpose.SAMPLE) -> int:
    """One of `ids`, each with the probability that its score says: the greatest of score and Gumbel noise."""
    noise = -np.log(-np.log(uniforms(ids, context.sampling.seed, context.choice, len(context.ids), purpose)))
    return int(ids[(scores + noise).argmax()])


def logprob(logits: Logits, token: int, alternatives: int) -> TokenLogprob:
    """What the model's own distribution says of `token`, and its most likely ids, best first."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= math.log(np.exp(values).sum())
    np.maximum(values, LEAST_LOGPROB, out=values)
    top = best(values, min(alternatives, len(values)))
    return TokenLogprob(token, float(values[token]), top.tolist(), values[top].tolist())


def penalise(scores: Reals, context: Context) -> Reals:
    """Apply the penalties in place. Repetition divides what is positive and multiplies what is negative, so that a
    value above 1 always makes a seen token less likely."""
    sampling = context.sampling
    if not penalised(sampling):
        return scores
    seen = np.unique(np.asarray(context.ids, dtype=np.int64))
    if sampling.repetition != 1.0:
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / sampling.repetition, old * sampling.repetition)
    output, counts = np.unique(np.asarray(context.ids[context.prompt_len :], dtype=np.int64), return_counts=True)
    scores[output] -= sampling.presence + sampling.frequency * counts
    return scores


def restrict(scores: Reals, context: Context) -> Reals:
    """Apply the bias and the bans in place: a banned id gets -inf. A ban that would leave nothing is not applied."""
    sampling, ids = context.sampling, context.ids
    for token, bias in sampling.bias.items():
        scores[token] += bias
    if context.mask is not None:
        scores[~context.mask] = -np.inf
    if sampling.allowed:
        others = np.ones(len(scores), dtype=np.bool_)
        others[list(sampling.allowed)] = False
        scores[others] = -np.inf
    banned = {word[-1] for word in sampling.banned if follows(ids, word[:-1])}
    if len(ids) - context.prompt_len < sampling.min_tokens:
        banned.update(sampling.ends)
    if banned:
        before = scores[list(banned)]
        scores[list(banned)] = -np.inf
        if np.isneginf(scores.max()):
            scores[list(banned)] = before
    return scores


def keep(scores: Reals, sampling: Sampling) -> Ids:
    """The ids that stay in the running under top-k, top-p, min-p and typical, in order of id. `scores` are
    log-probabilities up to a constant. At least one id always stays: the best one, but for typical."""
    ids = np.arange(len(scores))
    if 0 < sampling.top_k < len(ids):
        ids = np.sort(best(scores, sampling.top_k))
    if sampling.top_p < 1.0:
        ids = ids[_nucleus(scores[ids], sampling.top_p)]
    if sampling.min_p > 0.0:
        kept = scores[ids]
        ids = ids[kept >= kept.max() + math.log(min(sampling.min_p, 1.0))]
    if sampling.typical_p < 1.0:
        ids = ids[_typical(scores[ids], sampling.typical_p)]
    return ids


def best(scores: Reals, n: int) -> Ids:
    """Indices of the `n` greatest scores, greatest first, equal ones by index."""
    if n <= 0:
        return np.empty(0, dtype=np.int64)
    if n < len(scores):
        least = np.partition(scores, len(scores) - n)[len(scores) - n]
        above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
        candidates = np.concatenate([above, equal[: n - len(above)]])
    else:
        candidates = np.arange(len(scores))
    return candidates[np.lexsort((candidates, -scores[candidates]))]


def _nucleus(scores: Reals, top_p: float) -> Ids:
    """Indices, ascending, of the smallest set of most likely tokens whose probabilities sum to `top_p` or more."""
    return np.sort(_reaching(scores, np.exp(scores - scores.max()), top_p))


def _reaching(ranks: Reals, probs: Reals, share: float) -> Ids:
    """The fewest indices, greatest ranks first, that have `share` of all of `probs` or more."""
    target = share * probs.sum()
    for n in (_LIKELY, len(ranks)):
        order = best(ranks, min(n, len(ranks)))
        mass = np.cumsum(probs[order])
        if mass[-1] >= target:
            break
    enough = int(np.searchsorted(mass, target)) + 1  # past the end when rounding kept the sum below the target
    return order[:enough]


def _typical(scores: Reals, typical_p: float) -> Ids:
    """Indices, ascending, of the tokens that tell about as much as is expected of one, until their probabilities sum to
    `typical_p` or more: locally typical sampling (Meister et al., TACL 2023). How far a token's information is from the
    entropy is how far its score is from the scores' mean. Those equally far are kept together."""
    probs = np.exp(scores - scores.max())
    far = np.abs(scores - (probs * scores).sum() / probs.sum())
    return np.flatnonzero(far <= far[_reaching(-far, probs, typical_p)[-1]])


def shaped(sampling: Sampling) -> bool:
    """Whether anything beside the temperature can change which token is the likeliest."""
    restricted = sampling.bias or sampling.allowed or sampling.banned or sampling.min_tokens
    return bool(restricted) or penalised(sampling)


def follows(ids: list[int], head: tuple[int, ...]) -> bool:
    """Whether the sequence ends with `head`."""
    return not head or tuple(ids[-len(head) :]) == head


def penalised(sampling: Sampling) -> bool:
    """Whether what was said changes what comes."""
    return sampling.repetition != 1.0 or sampling.presence != 0.0 or sampling.frequency != 0.0
