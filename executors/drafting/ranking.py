"""The likeliest next tokens by a drafter's logits, with the options of each sequence.

Coupled, likely means: likely to be what the target draws. So the noise that it will draw with is added first, and where
the two distributions are alike the best token is the one drawn (several of them: Kool et al., "Stochastic Beams and
Where to Find Them", ICML 2019). By `rejection` they are the most probable ones; a guess is certain then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.executors.drafting.verification import Rule
from octavo.executors.philox import Purpose, uniforms
from octavo.executors.residents import Resident
from octavo.executors.sampling import Context, Ids, Logits, Reals, best, penalise, restrict, running, shaped

Ranked = list[tuple[int, float]]
"""Tokens and their log-probabilities, best first."""


def ranked(
    logits: Tensor,
    ids: Tensor | None,
    asked: Sequence[tuple[Resident, list[int]]],
    n: int,
    rule: Rule,
    vocab_size: int,
) -> list[Ranked]:
    """For each row of `logits` the best `n` tokens after a resident and some guesses. `ids` are the tokens that the
    columns stand for, if not all of the vocabulary in order. Both may be on a device, from which only what is looked at
    is brought."""
    tops = logits.log_softmax(-1).topk(min(n, logits.shape[-1]))
    tokens, values = (tops.indices if ids is None else ids[tops.indices]).tolist(), tops.values.tolist()
    columns = slice(None) if ids is None else ids.cpu().numpy()
    out: list[Ranked] = []
    for i, (resident, guesses) in enumerate(asked):
        sampling = resident.sampling
        if sampling.temperature == 0 and not shaped(sampling):
            pairs = zip(tokens[i], values[i], strict=True)
            out.append([pair for pair in pairs if math.isfinite(pair[1])])
            continue
        row = np.full(vocab_size, -np.inf, dtype=np.float32)
        row[columns] = logits[i].cpu().numpy()
        context = Context(sampling, resident.choice, resident.prompt_len, [*resident.tokens, *guesses])
        out.append(_top(*_scores(row, context, rule), n))
    return out


def _scores(row: Logits, context: Context, rule: Rule) -> tuple[Ids, Reals]:
    sampling, scores = context.sampling, restrict(penalise(row.astype(np.float64), context), context)
    if not scores.max() > -np.inf:  # of what may come the head knows nothing, or it says numbers that are none
        return np.arange(0), scores[:0]
    if sampling.temperature == 0:
        return np.arange(len(row)), scores
    ids, scores = running(scores, sampling)
    if rule == "coupled":
        lots = uniforms(ids, sampling.seed, context.choice, len(context.ids), Purpose.SAMPLE)
        scores = scores - np.log(-np.log(lots))
    return ids, scores


def _top(ids: Ids, scores: Reals, n: int) -> Ranked:
    if not len(ids):
        return []
    places = best(scores, min(n, len(ids)))
    places = places[np.isfinite(scores[places])]
    top = scores[places]
    norm = np.logaddexp.reduce(scores)
    return list(zip(ids[places].tolist(), (top - norm).tolist(), strict=True))
