"""Drafter `self`: the target's own first layers, as if they were all.

Zhang et al., "Draft & Verify", ACL 2024; Elhoushi et al., "LayerSkip", ACL 2024. It needs no weights and no KV of its
own: the KV of the first layers is the target's, and verification computes the same again. Models that were not trained
to be left early guess poorly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from octavo.core.models.errors import ModelError
from octavo.executors.drafting.contract import WHOLE, Draft, Drafter, DrafterOptions, Host, Want
from octavo.executors.drafting.rolling import roll


class EarlyExit(Drafter):
    class Options(DrafterOptions, frozen=True):
        layers: Annotated[int, msgspec.Meta(ge=0)] = 0
        """How many are computed; 0 is half of them."""

    def __init__(self, host: Host, options: Options) -> None:
        if host.target is None:
            raise ModelError(f"this executor cannot run part of its model: choose another drafter, or {WHOLE}")
        layers = options.layers or host.target.layers // 2
        if not 0 < layers < host.target.layers:
            raise ModelError(f"speculation.options.layers is {layers}, the model has {host.target.layers}: take fewer")
        self._stack = host.target
        self._layers = layers
        self._vocab_size = host.facts.vocab_size
        self._rule = host.config.speculation.verification

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        starts = [len(want.resident.tokens) - 1 for want in wants]
        return roll(self._stack, wants, starts, self._vocab_size, self._rule, self._layers)
