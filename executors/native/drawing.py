"""Draws of the step library, for what is asked most: a temperature, and nothing that changes which ids may come.

They are the sampler's own, a tenth as dear; a row that asks for more is the sampler's (`executors.sampling`).
"""

from __future__ import annotations

from octavo.core.messages import Sampling
from octavo.executors.native.library import Floats
from octavo.executors.native.program import Native
from octavo.executors.sampling import shaped


def only_warm(sampling: Sampling) -> bool:
    """Whether `draw` may stand in for the sampler."""
    whole = sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0
    return whole and sampling.temperature > 0 and sampling.grammar is None and not shaped(sampling)


def draw(model: Native, row: Floats, sampling: Sampling, choice: int, position: int) -> int:
    """The id at `position` of a sequence, from its finite logits [vocab]."""
    token: int = model.weights.library.oct_draw(
        model.isa, row.ctypes.data, len(row), sampling.temperature, sampling.seed, choice, position
    )
    return token
