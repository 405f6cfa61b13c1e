"""The `Deltas` of one message in the making: rows of new tokens, and the choices that ended."""

from __future__ import annotations

from octavo.core.messages import Deltas, End, TokenLogprob, col
from octavo.core.scheduler.sequence import Sequence


class Rows:
    """Collects rows; those of an orphan are left out, since nobody would take them (its resume says them again)."""

    def __init__(self) -> None:
        self._handle: list[int] = []
        self._choice: list[int] = []
        self._attempt: list[int] = []
        self._index: list[int] = []
        self._n: list[int] = []
        self._cached: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob | None] = []
        self._ends: list[End] = []

    def add(
        self, sequence: Sequence, index: int, tokens: list[int], logprobs: list[TokenLogprob | None] | None
    ) -> None:
        """Tokens of a choice from output `index` on."""
        request = sequence.request
        if request.orphan:
            return
        self._handle.append(request.handle)
        self._choice.append(sequence.choice)
        self._attempt.append(request.attempt)
        self._index.append(index)
        self._n.append(len(tokens))
        self._cached.append(max(0, sequence.cached))
        self._tokens += tokens
        self._logprobs += logprobs or [None] * len(tokens)

    def end(self, sequence: Sequence, reason: str, detail: str) -> None:
        """Nothing more comes for this choice."""
        request = sequence.request
        if not request.orphan:
            self._ends.append(End(request.handle, sequence.choice, request.attempt, reason, detail))

    def message(self, step: int) -> Deltas | None:
        """What was collected, or None if there is nothing to say."""
        if not self._handle and not self._ends:
            return None
        return Deltas(
            step=step,
            handle=col(self._handle),
            choice=col(self._choice),
            attempt=col(self._attempt),
            index=col(self._index),
            n=col(self._n),
            cached=col(self._cached),
            tokens=col(self._tokens),
            ends=self._ends,
            logprobs=self._logprobs if any(lp is not None for lp in self._logprobs) else None,
        )
