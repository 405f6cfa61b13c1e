"""What came of a step's runs, and how it is told: shared by the executors that have a model.

A run that fails takes nobody with it, and its residency stays failed: steps that were planned for it ahead of this
result fail for the same reason. A step may begin before the one before it has ended: then residents are where its plan
takes them, with numbers in place of tokens that the host does not know yet. Knows no weights, no KV bytes, no sampling.
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
    depth: int = 0
    """Places that they were for: `drafted` of a chain, fewer of a tree."""


class Settlement:
    """Settles outcomes with the residents, and remembers which residencies have failed."""

    def __init__(self, vocab_size: int, adapters: Finds | None = None) -> None:
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._failed: WeakKeyDictionary[Resident, str] = WeakKeyDictionary()
        """Why a residency can no longer be computed. Not by open_id: each generation of the scheduler counts anew."""

    def clear(self) -> None:
        self._failed.clear()

    @property
    def failures(self) -> bool:
        """Whether any residency has failed."""
        return bool(self._failed)

    def failure(self, run: Run) -> str | None:
        """Why its residency has failed, if it has."""
        return self._failed.get(run.resident)

    def refused(self, runs: Sequence[Run]) -> list[Outcome]:
        """An outcome per run: failed for those that cannot be computed at all, empty for the others."""
        return [Outcome(self._refusal(run)) for run in runs]

    def expect(self, runs: Sequence[Run], unknown: Sequence[int]) -> None:
        """Bring the residents to where the plan's author takes them to be, before the outcomes are known: each run that
        samples says one token, for which the next of the `unknown` stands until then."""
        numbers = iter(unknown)
        for run in runs:
            run.resident.kv_len = run.end
            if run.samples:
                run.resident.tokens.append(next(numbers))
                run.resident.unknown += 1

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
            kv_len=col([_kv_len(run, outcome) for run, outcome in done]),
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
            depth=col(depth) if (depth := [outcome.depth for _, outcome in done]) != drafted else EMPTY,
        )

    def _refusal(self, run: Run) -> str | None:
        if self._failed and (reason := self._failed.get(run.resident)) is not None:
            return reason
        resident = run.resident
        ids = resident.tokens[run.start : min(run.end, len(resident.tokens) - resident.unknown)]
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            return f"a token id is outside of the model's vocabulary [0, {self._vocab_size})"
        if (adapter := run.resident.adapter) is not None:
            return "this executor has no LoRA adapters" if self._adapters is None else self._adapters.missing(adapter)
        return None

    def _settle(self, run: Run, outcome: Outcome) -> None:
        """Bring the resident to where the plan's author takes it to be, also when it failed: its next step may be
        on the way already."""
        resident, said = run.resident, outcome.tokens
        if outcome.failure is not None:
            self._failed[resident] = outcome.failure
            said = (0,) * run.samples
        expected = int(run.samples and resident.unknown > 0)
        resident.unknown -= expected
        resident.tokens[run.end : run.end + expected] = said
        resident.kv_len = max(resident.kv_len, _kv_len(run, outcome))


def _kv_len(run: Run, outcome: Outcome) -> int:
    """After it: guesses that were right have their KV already."""
    return run.end + max(0, len(outcome.tokens) - 1)
