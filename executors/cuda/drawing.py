"""What the sampling kernels are told of a step's rows: draws, counts of tokens, what is allowed, and bias.

A row is what the model says after a sequence's tokens and some guesses. Pure NumPy; only sequences that ask for more
than the plain distribution cost anything here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.core.grammar import Mask
from octavo.executors.cuda.batch import Ints
from octavo.executors.residents import Resident
from octavo.executors.sampling import Context, penalised, restrict
from octavo.kernels.cuda.draws import IN_PROMPT, Draws, draws


class Rows(NamedTuple):
    """A row of each of `residents`, of what comes at `positions`. `guesses` are taken to follow its tokens, `masks` are
    what its grammar lets come next, by row for whom it concerns."""

    residents: list[Resident]
    positions: Ints
    guesses: dict[int, tuple[int, ...]]
    masks: dict[int, Mask]

    def ids(self, i: int) -> list[int]:
        """All that is taken to be said before it."""
        return [*self.residents[i].tokens, *self.guesses.get(i, ())]


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """`counts` [n, vocabulary] and `allowed` [n, ⌈vocabulary / 32⌉] are there for whom it concerns: `draws` says which
    rows are whose. The same for the entries of the bias lists."""

    draws: Draws
    counts: Ints
    allowed: Ints
    bias_ids: Ints
    bias_values: npt.NDArray[np.float64]


class Drawer:
    """Makes the drawings of one step after the other. Where the rows are those of the sequences of the step before, as
    when all decode, what they ask for is known already."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._known: tuple[list[Resident], Draws] | None = None
        self._nothing = (
            np.empty((0, vocabulary), np.int32),
            np.empty((0, -(-vocabulary // 32)), np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.float64),
        )

    def drawing(self, rows: Rows) -> Drawing:
        residents = rows.residents
        known = self._known
        if known is not None and not rows.masks and (known[0] is residents or known[0] == residents):
            made = known[1]
            made["position"] = rows.positions
            return Drawing(made, *self._nothing)
        made = _asked(residents)
        made["position"] = rows.positions
        counts: list[Ints] = []
        allowed: list[Ints] = []
        bias: list[tuple[int, float]] = []
        for i, resident in enumerate(residents):
            sampling = resident.sampling
            if penalised(sampling):
                made["counts"][i] = len(counts)
                counts.append(_counts(rows.ids(i), resident.prompt_len, self._vocabulary))
            if i in rows.masks or sampling.allowed or sampling.banned or sampling.min_tokens:
                made["allowed"][i] = len(allowed)
                context = Context(sampling, resident.choice, resident.prompt_len, rows.ids(i), rows.masks.get(i))
                allowed.append(_bits(_allowed(context, self._vocabulary)))
            if sampling.bias:
                made["bias"][i] = len(bias)
                bias += sampling.bias.items()
                made["bias_end"][i] = len(bias)
        self._known = None if counts or allowed or bias else (residents, made)
        return Drawing(
            made,
            np.array(counts, dtype=np.int32).reshape(-1, self._vocabulary),
            np.array(allowed, dtype=np.int32).reshape(-1, -(-self._vocabulary // 32)),
            np.array([token for token, _ in bias], dtype=np.int32),
            np.array([value for _, value in bias], dtype=np.float64),
        )


def _asked(residents: list[Resident]) -> Draws:
    made = draws(len(residents))
    samplings = [resident.sampling for resident in residents]
    for name in ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency", "top_k"):
        made[name] = [getattr(sampling, name) for sampling in samplings]
    made["seed"] = [sampling.seed & 0xFFFFFFFFFFFFFFFF for sampling in samplings]
    made["choice"] = [resident.choice for resident in residents]
    return made


def _counts(ids: list[int], prompt_len: int, vocabulary: int) -> Ints:
    """How often each token was put out, and whether the prompt has it."""
    counts = np.bincount(np.asarray(ids[prompt_len:], dtype=np.int64), minlength=vocabulary)
    counts[ids[:prompt_len]] |= IN_PROMPT
    return counts.astype(np.int32)


def _allowed(context: Context, vocabulary: int) -> npt.NDArray[np.bool_]:
    """What the restrictions leave, whatever the logits are: they hold of any."""
    return ~np.isneginf(restrict(np.zeros(vocabulary), context))


def _bits(allowed: npt.NDArray[np.bool_]) -> Ints:
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
