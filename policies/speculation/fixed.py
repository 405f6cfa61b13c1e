"""The same number of drafts always."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from octavo.policies.contract import Ints, PolicyOptions, Running, Step


class Fixed:
    """Up to `tokens` drafts for every sequence, but never more than it may still produce."""

    class Options(PolicyOptions, frozen=True):
        tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 4

    def __init__(self, options: Options) -> None:
        self._tokens = options.tokens

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        return np.where(running.decoding, np.clip(running.output_left - 1, 0, self._tokens), 0).astype(np.int32)
