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
from octavo.core.messages import Sampling
from octavo.executors.cuda.batch import Ints
from octavo.executors.residents import Resident
from octavo.executors.sampling import Context, restrict
from octavo.kernels.cuda.draws import IN_PROMPT, Draws, draws


class Row(NamedTuple):
    """`guesses` are taken to follow the resident's tokens; `mask` is what its grammar lets come next."""

    resident: Resident
    guesses: tuple[int, ...] = ()
    mask: Mask | None = None


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

    def drawing(self, rows: list[Row]) -> Drawing:
        residents = [row.resident for row in rows]
        positions = [len(row.resident.tokens) + len(row.guesses) for row in rows]
        if self._known is not None and self._known[0] == residents and all(row.mask is None for row in rows):
            made = self._known[1]
            made["position"] = positions
            return Drawing(made, *self._nothing)
        made = _asked(residents)
        made["position"] = positions
        counts: list[Ints] = []
        allowed: list[Ints] = []
        bias: list[tuple[int, float]] = []
        for i, row in enumerate(rows):
            sampling = row.resident.sampling
            if _penalised(sampling):
                made["counts"][i] = len(counts)
                counts.append(_counts(row, self._vocabulary))
            if row.mask is not None or sampling.allowed or sampling.banned or sampling.min_tokens:
                made["allowed"][i] = len(allowed)
                allowed.append(_bits(_allowed(row, self._vocabulary)))
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

    @property
    def _nothing(self) -> tuple[Ints, Ints, Ints, npt.NDArray[np.float64]]:
        return (
            np.empty((0, self._vocabulary), np.int32),
            np.empty((0, -(-self._vocabulary // 32)), np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.float64),
        )


def _asked(residents: list[Resident]) -> Draws:
    made = draws(len(residents))
    samplings = [resident.sampling for resident in residents]
    for name in ("temperature", "top_p", "min_p", "typical_p", "repetition", "presence", "frequency", "top_k"):
        made[name] = [getattr(sampling, name) for sampling in samplings]
    made["seed"] = [sampling.seed & 0xFFFFFFFFFFFFFFFF for sampling in samplings]
    made["choice"] = [resident.choice for resident in residents]
    return made


def _penalised(sampling: Sampling) -> bool:
    return sampling.repetition != 1.0 or sampling.presence != 0.0 or sampling.frequency != 0.0


def _counts(row: Row, vocabulary: int) -> Ints:
    """How often each token was put out, and whether the prompt has it."""
    resident = row.resident
    put_out = [*resident.tokens[resident.prompt_len :], *row.guesses]
    counts = np.bincount(np.asarray(put_out, dtype=np.int64), minlength=vocabulary)
    counts[resident.tokens[: resident.prompt_len]] |= IN_PROMPT
    return counts.astype(np.int32)


def _allowed(row: Row, vocabulary: int) -> npt.NDArray[np.bool_]:
    """What the restrictions leave, whatever the logits are: they hold of any."""
    resident = row.resident
    ids = [*resident.tokens, *row.guesses]
    context = Context(resident.sampling, resident.choice, resident.prompt_len, ids, row.mask)
    return ~np.isneginf(restrict(np.zeros(vocabulary), context))


def _bits(allowed: npt.NDArray[np.bool_]) -> Ints:
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
