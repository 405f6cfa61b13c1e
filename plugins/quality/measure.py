"""Two models' distributions over the next token, position by position: how far one is from the other."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
"""Logits, [positions, vocab]: row i is about the token after the first i + 1."""

_AT_ONCE = 64


class Quality(NamedTuple):
    """`kl` is the mean divergence from the reference, in nats; `top1` how often the likeliest token is the same;
    perplexities are of the text itself."""

    positions: int
    kl: float
    top1: float
    perplexity: float
    reference: float


def compare(ours: Floats, reference: Floats, ids: list[int]) -> Quality:
    """`ids` is the text that both have read: the last row is about no token of it, but counts for the rest."""
    divergences: list[float] = []
    same = 0
    losses = np.zeros(2)
    for at in range(0, len(reference), _AT_ONCE):
        p, q = (_log_softmax(rows[at : at + _AT_ONCE]) for rows in (reference, ours))
        divergences += (np.exp(p) * (p - q)).sum(-1).tolist()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        after = ids[at + 1 : at + 1 + len(p)]
        rows = np.arange(len(after))
        losses -= np.array([q[rows, after].sum(), p[rows, after].sum()])
    perplexity, theirs = np.exp(losses / max(1, len(ids) - 1)).tolist()
    return Quality(len(divergences), float(np.mean(divergences)), same / len(divergences), perplexity, theirs)


def _log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    values = logits.astype(np.float64)
    values -= values.max(-1, keepdims=True)
    return np.asarray(values - np.log(np.exp(values).sum(-1, keepdims=True)))
