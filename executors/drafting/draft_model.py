"""Drafter `draft-model`: a second, smaller model with the same vocabulary, and KV of its own for the same blocks.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023. It computes nothing until
there is something to draft; then it catches up with what the target computed without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from octavo.core.messages import StepBind
from octavo.core.models.errors import ModelError
from octavo.executors.drafting.contract import NO_DRAFT, WHOLE, Draft, Drafter, DrafterOptions, Host, Want
from octavo.executors.drafting.paged import Written
from octavo.executors.drafting.rolling import roll
from octavo.executors.residents import Span


class DraftModel(Drafter):
    class Options(DrafterOptions, frozen=True):
        model: str = ""
        """The smaller model: whatever `model.path` takes."""
        catch_up: Annotated[int, msgspec.Meta(ge=1)] = 256
        """Most tokens of a step that are computed to catch up; who is further behind gets no guesses in it."""

    def __init__(self, host: Host, options: Options) -> None:
        if not options.model:
            raise ModelError("the drafter draft-model needs speculation.options.model: the path of the smaller model")
        if host.open is None:
            raise ModelError(f"this executor cannot run a second model: choose another drafter, or {WHOLE}")
        self._stack = host.open(options.model)
        if self._stack.vocab_size < host.facts.vocab_size:
            raise ModelError(
                f"the draft model {options.model} has {self._stack.vocab_size} tokens, {host.facts.model_id} has "
                f"{host.facts.vocab_size}: it must have the same vocabulary"
            )
        self._vocab_size = host.facts.vocab_size
        self._rule = host.config.speculation.verification
        self._catch_up = options.catch_up
        self._written = Written(host.facts.places, host.facts.block_size)

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(wants)
        room = self._catch_up
        ready: list[int] = []
        starts: list[int] = []
        behind: list[Span] = []
        for i, (resident, most) in enumerate(wants):
            if len(resident.tokens) + most > self._stack.context:  # it may know shorter texts only than the target
                continue
            start = min(self._written.upto(resident), len(resident.tokens) - 1)
            left = len(resident.tokens) - start
            if left <= room or left == 1:
                ready.append(i)
                starts.append(start)
                room -= left - 1
            elif room > 0:
                behind.append(Span(resident.tokens[start : start + room], start, resident.table))
                self._written.wrote(resident, start, behind[-1].ids)
                room = 0
        if behind:
            self._stack.after(behind)
        chosen = [wants[i] for i in ready]
        rolled = roll(self._stack, chosen, starts, self._vocab_size, self._rule)
        for i, start, draft in zip(ready, starts, rolled, strict=True):
            resident = wants[i].resident
            self._written.wrote(resident, start, [*resident.tokens[start:], *draft.tokens[:-1]])
            drafts[i] = draft
        return drafts

    def bound(self, bind: StepBind) -> None:
        if len(bind.copy_src):
            source, target = bind.copy_src.tolist(), bind.copy_dst.tolist()
            self._stack.copy_blocks(source, target)
            self._written.copy(source, target)

    def forget(self) -> None:
        self._written.clear()
