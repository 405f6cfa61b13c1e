"""Who finds most of its prompt in the prefix tree goes first, before it is forgotten (SGLang, Zheng et al., 2024)."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import PolicyOptions, Running, Selection, Step, Waiting


class PrefixFirst:
    """By the length of the cached prefix, with ageing: each second of waiting counts as so many cached tokens."""

    class Options(PolicyOptions, frozen=True):
        ageing: Annotated[float, msgspec.Meta(ge=0)] = 50.0
        """Tokens a second."""

    def __init__(self, options: Options) -> None:
        self._ageing = options.ageing

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        waited_s = (step.now_ns - waiting.arrival_ns) / 1e9
        return Selection(np.argsort(-(waiting.cached + self._ageing * waited_s), kind="stable").astype(np.int32))
