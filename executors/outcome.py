"""What came of a step's runs, and how it is told: shared by the executors that have a model.

A run that fails takes nobody with it, and its residency stays failed: steps that were planned for it ahead of this
result fail for the same reason. Knows no weights, no KV bytes, no sampling.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from octavo.core.messages import EMPTY, ChunkLogprobs, Failed, StepResult, TokenLogprob, col
from octavo.executors.adapters import Finds
from octavo.executors.residents import Resident, Run


class Outcome(NamedTuple):
    """What came of a run: a reason why it failed, or its new tokens with an entry each."""

    failure: str | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt: list[TokenLogprob] | None = None
    """Of the prompt's tokens after the run's first one, if they were asked for."""
    drafted: int = 0
    """Guesses that were verified: all of `tokens` but the last were among them."""


class Settlement:
    """Settles outcomes with the residents, and remembers which residencies have failed."""

    def __init__(self, vocab_size: int, adapters: Finds | None = None) -> None:
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._failed: WeakKeyDictionary[Resident, str] = WeakKeyDictionary()
        """Why a residency can no longer be computed. Not by open_id: each generation of the scheduler counts anew."""

    def clear(self) -> None:
        self._failed.clear()

    def refused(self, runs: Sequence[Run]) -> list[Outcome]:
        """An outcome per run: failed for those that cannot be computed at all, empty for the others."""
        return [Outcome(self._refusal(run)) for run in runs]

    def result(self, step: int, started_ns: int, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> StepResult:
        """Bring the residents up to date, and tell the scheduler."""
        for run, outcome in zip(runs, outcomes, strict=True):
            self._settle(run, outcome)
        done = [(run, outcome) for run, outcome in zip(runs, outcomes, strict=True) if outcome.failure is None]
        wanted = any(run.resident.sampling.logprobs >= 0 for run, _ in done)
        return StepResult(
            step=step,
            slot=col([run.slot for run, _ in done]),
            open_id=col([run.resident.open_id for run, _ in done]),
            n_new=col([len(outcome.tokens) for _, outcome in done]),
            tokens=col([token for _, outcome in done for token in outcome.tokens]),
            kv_len=col([run.resident.kv_len for run, _ in done]),
            started_ns=started_ns,
            finished_ns=time.monotonic_ns(),
            failed=[
                Failed(run.slot, run.resident.open_id, outcome.failure)
                for run, outcome in zip(runs, outcomes, strict=True)
                if outcome.failure is not None
            ],
            logprobs=[entry for _, outcome in done for entry in outcome.logprobs] if wanted else None,
            prompts=[
                ChunkLogprobs(run.resident.open_id, run.start + 1, outcome.prompt)
                for run, outcome in done
                if outcome.prompt is not None
            ],
            drafted=col(drafted) if any(drafted := [outcome.drafted for _, outcome in done]) else EMPTY,
        )

    def _refusal(self, run: Run) -> str | None:
        if self._failed and (reason := self._failed.get(run.resident)) is not None:
            return reason
        ids = run.resident.tokens[run.start : run.end]
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            return f"a token id is outside of the model's vocabulary [0, {self._vocab_size})"
        if (adapter := run.resident.adapter) is not None:
            return "this executor has no LoRA adapters" if self._adapters is None else self._adapters.missing(adapter)
        return None

    def _settle(self, run: Run, outcome: Outcome) -> None:
        """Bring the resident to where the plan's author takes it to be, also when it failed: its next step may be
        on the way already."""
        run.resident.kv_len = run.end + max(0, len(outcome.tokens) - 1)  # guesses that were right have theirs already
        if outcome.failure is not None:
            self._failed[run.resident] = outcome.failure
            run.resident.tokens += [0] * run.samples
        run.resident.tokens += outcome.tokens
