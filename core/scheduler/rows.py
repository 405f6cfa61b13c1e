"""The `Deltas` of one message in the making: rows of new tokens, and the choices that ended."""

from __future__ import annotations

import numpy as np

from octavo.core.messages import EMPTY, Col, Deltas, End, PromptLogprobs, Stages, TokenLogprob, col
from octavo.core.scheduler.sequence import Request, Sequence

INDEX, N = 3, 4
"""Which columns of a row are its index and how many tokens it has."""


class Rows:
    """Collects rows; those of an orphan are left out, since nobody would take them (its resume says them again)."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        """handle, choice, attempt, index, n, cached"""
        self._tokens: list[int] = []
        self._alike: Col | None = None
        """As `_rows`, of rows with as many tokens each: shape [6, rows]."""
        self._alike_tokens: Col | None = None
        self._logprobs: list[TokenLogprob | None] | None = None
        """An entry per token, from the first row on that has any."""
        self._ends: list[End] = []
        self._prompts: list[PromptLogprobs] = []
        self._guesses: list[int] = []

    def guessed(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Guesses of a choice were verified, and so many of them were right; before it ends."""
        request = sequence.request
        if not request.orphan:
            self._guesses += (request.handle, sequence.choice, request.attempt, drafted, accepted)

    def add(
        self, sequence: Sequence, index: int, tokens: list[int], logprobs: list[TokenLogprob | None] | None
    ) -> None:
        """Tokens of a choice from output `index` on."""
        request = sequence.request
        if request.orphan:
            return
        if logprobs is not None and self._logprobs is None:
            self._logprobs = [None] * len(self._tokens)
        if self._logprobs is not None:
            self._logprobs += logprobs or [None] * len(tokens)
        self._rows.append(row(sequence, index, len(tokens)))
        self._tokens += tokens

    def add_alike(self, rows: Col, n: int, tokens: Col) -> None:
        """`n` tokens of each of many choices, without log-probabilities; once. `rows`: a copy of what `row` says of
        them, shape [6, rows]."""
        rows[N] = n
        self._alike, self._alike_tokens = rows, tokens

    def prompt(self, request: Request) -> None:
        """The log-probabilities of its prompt, which are complete; before any row of it."""
        if not request.orphan:
            self._prompts.append(PromptLogprobs(request.handle, request.attempt, request.prompt_logprobs))

    def end(self, sequence: Sequence, reason: str, detail: str, now_ns: int) -> None:
        """Nothing more comes for this choice."""
        request = sequence.request
        if not request.orphan:
            stages = _stages(sequence, now_ns)
            self._ends.append(End(request.handle, sequence.choice, request.attempt, reason, detail, stages))

    def message(self, step: int) -> Deltas | None:
        """What was collected, or None if there is nothing to say."""
        if not self._rows and self._alike is None and not self._ends and not self._prompts:
            return None
        columns, tokens = self._alike, self._alike_tokens
        if self._rows or columns is None or tokens is None:
            rows = np.array(self._rows, dtype=np.int32).reshape(-1, 6).T
            columns = rows if columns is None else np.concatenate((rows, columns), axis=1)
            tokens = col(self._tokens) if tokens is None else np.concatenate((col(self._tokens), tokens))
        handle, choice, attempt, index, n, cached = columns
        guesses = col(self._guesses) if self._guesses else EMPTY
        return Deltas(
            step, handle, choice, attempt, index, n, cached, tokens, self._ends, self._logprobs, self._prompts, guesses
        )


def row(sequence: Sequence, index: int, n: int) -> tuple[int, int, int, int, int, int]:
    """A row's columns: handle, choice, attempt, index, n, cached."""
    request = sequence.request
    return request.handle, sequence.choice, request.attempt, index, n, max(0, sequence.cached)


def _stages(sequence: Sequence, now_ns: int) -> Stages:
    """Of a choice that ends now."""
    admitted_ns = sequence.admitted_ns or now_ns
    first_ns = sequence.first_ns or now_ns
    return Stages(
        queue_ns=max(0, admitted_ns - sequence.request.arrival_ns),
        prefill_ns=max(0, first_ns - admitted_ns),
        decode_ns=max(0, now_ns - first_ns),
        preemptions=sequence.preemptions,
    )
