"""What the sampling kernels are told of a step's sequences: draws, counts of tokens, what is allowed, and bias.

Pure NumPy. Only sequences that ask for more than the plain distribution cost anything here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.messages import Sampling
from octavo.executors.cuda.batch import Ints
from octavo.executors.residents import Resident
from octavo.executors.sampling import Context, restrict
from octavo.kernels.cuda.draws import IN_PROMPT, Draws, draws


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """`counts` [n, vocabulary] and `allowed` [n, ⌈vocabulary / 32⌉] are there for whom it concerns: `draws` says which
    rows are whose. The same for the entries of the bias lists."""

    draws: Draws
    counts: Ints | None
    allowed: Ints | None
    bias_ids: Ints
    bias_values: npt.NDArray[np.float64]


def drawing(residents: list[Resident], vocabulary: int) -> Drawing:
    made = draws(len(residents))
    counts: list[Ints] = []
    allowed: list[Ints] = []
    bias: list[tuple[int, float]] = []
    for i, resident in enumerate(residents):
        sampling = resident.sampling
        for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "top_k"):
            made[name][i] = getattr(sampling, name)
        made["seed"][i] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        made["choice"][i], made["position"][i] = resident.choice, len(resident.tokens)
        if _penalised(sampling):
            made["counts"][i] = len(counts)
            counts.append(_counts(resident, vocabulary))
        if sampling.allowed or sampling.banned or sampling.min_tokens:
            made["allowed"][i] = len(allowed)
            allowed.append(_bits(_allowed(resident, vocabulary)))
        made["bias"][i] = len(bias)
        bias += sampling.bias.items()
        made["bias_end"][i] = len(bias)
    return Drawing(
        made,
        np.stack(counts) if counts else None,
        np.stack(allowed) if allowed else None,
        np.array([token for token, _ in bias], dtype=np.int32),
        np.array([value for _, value in bias], dtype=np.float64),
    )


def _penalised(sampling: Sampling) -> bool:
    return sampling.repetition != 1.0 or sampling.presence != 0.0 or sampling.frequency != 0.0


def _counts(resident: Resident, vocabulary: int) -> Ints:
    """How often each token was put out, and whether the prompt has it."""
    counts = np.bincount(np.asarray(resident.tokens[resident.prompt_len :], dtype=np.int64), minlength=vocabulary)
    counts[resident.tokens[: resident.prompt_len]] |= IN_PROMPT
    return counts.astype(np.int32)


def _allowed(resident: Resident, vocabulary: int) -> npt.NDArray[np.bool_]:
    """What the restrictions leave, whatever the logits are: they hold of any."""
    context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens)
    return ~np.isneginf(restrict(np.zeros(vocabulary), context))


def _bits(allowed: npt.NDArray[np.bool_]) -> Ints:
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
