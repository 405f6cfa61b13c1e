"""What came of a step's runs, and how it is told: shared by the executors that have a model.

A run that fails takes nobody with it, and its residency stays failed: steps that were planned for it ahead of this
result fail for the same reason. A step may begin before the one before it has ended: then residents are where its plan
takes them, with numbers in place of tokens that the host does not know yet. Knows no weights, no KV bytes, no sampling.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from octavo.core.messages import EMPTY, ChunkLogprobs, Col, Failed, StepResult, TokenLogprob, col
from octavo.executors.adapters import Finds
from octavo.executors.residents import Resident, Run, Runs


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

    @property
    def plain(self) -> bool:
        """Whether a token is all there is to tell."""
        return len(self.tokens) == 1 and self == (None, self.tokens, (None,), None, 0, 0)


class Outcomes(NamedTuple):
    """By run: the token that it said, where that is all there is to tell, and of the others what is to tell, by index.

    Of hundreds of decodes most say one token and nothing else, and each would be an object a step."""

    tokens: Sequence[int]
    others: dict[int, Outcome]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Outcomes:
        others = {i: outcome for i, outcome in enumerate(outcomes) if not outcome.plain}
        return cls([0 if i in others else outcome.tokens[0] for i, outcome in enumerate(outcomes)], others)

    def at(self, i: int) -> Outcome:
        return self.others[i] if i in self.others else Outcome(None, (self.tokens[i],), (None,))

    def failed(self, i: int) -> bool:
        return i in self.others and self.others[i].failure is not None

    def said(self) -> list[int]:
        """All new tokens, run after run."""
        return [token for i in range(len(self.tokens)) for token in self.at(i).tokens]

    def logprobs(self) -> list[TokenLogprob | None]:
        """An entry for each of `said`."""
        return [entry for i in range(len(self.tokens)) for entry in self.at(i).logprobs]


class _Crowd(NamedTuple):
    """Of a step's runs, what stays while the same ones decode."""

    residents: list[Resident]
    tokens: list[list[int]]
    slot: Col
    open_id: Col
    ones: Col


class Settlement:
    """Settles outcomes with the residents, and remembers which residencies have failed."""

    def __init__(self, vocab_size: int, adapters: Finds | None = None) -> None:
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._failed: WeakKeyDictionary[Resident, str] = WeakKeyDictionary()
        """Why a residency can no longer be computed. Not by open_id: each generation of the scheduler counts anew."""
        self._crowd = _Crowd([], [], EMPTY, EMPTY, EMPTY)

    def clear(self) -> None:
        self._crowd = _Crowd([], [], EMPTY, EMPTY, EMPTY)
        self._failed.clear()

    @property
    def failures(self) -> bool:
        """Whether any residency has failed."""
        return bool(self._failed)

    def failure(self, run: Run) -> str | None:
        """Why its residency has failed, if it has."""
        return self._failed.get(run.resident)

    def refused(self, runs: Runs) -> dict[int, Outcome]:
        """Of those that cannot be computed at all, by index. A residency is looked at once: what it says is sound."""
        residents = runs.residents
        if residents is self._crowd.residents and not self._failed:
            return {}
        for resident in [resident for resident in residents if not resident.vetted]:
            resident.vetted = True
            if (why := self._unfit(resident)) is not None:
                self._failed[resident] = why
        if not self._failed:
            return {}
        whys = (self._failed.get(resident) for resident in residents)
        return {i: Outcome(why) for i, why in enumerate(whys) if why is not None}

    def expect(self, runs: Runs, unknown: Sequence[int]) -> None:
        """Bring the residents to where the plan's author takes them to be, before the outcomes are known: each run that
        samples says one token, for which the next of the `unknown` stands until then."""
        crowd = self._known(runs)
        for resident, end in zip(crowd.residents, runs.end.tolist(), strict=True):
            resident.kv_len = end
        asking = crowd.tokens if len(unknown) == len(runs) else compress(crowd.tokens, runs.samples.tolist())
        for tokens, number in zip(asking, unknown, strict=True):
            tokens.append(number)

    def result(self, step: int, started_ns: int, runs: Runs, outcomes: Outcomes) -> StepResult:
        """Bring the residents up to date, and tell the scheduler."""
        others, crowd = outcomes.others, self._known(runs)
        ends = runs.end.tolist()
        if ends and not others and len(crowd.tokens[0]) > ends[0]:  # all were expected
            for tokens, token in zip(crowd.tokens, outcomes.tokens, strict=True):
                tokens[-1] = token
        else:
            for i, outcome in others.items():
                self._settle(runs[i], outcome)
            for i, (resident, end, token) in enumerate(zip(crowd.residents, ends, outcomes.tokens, strict=True)):
                if i not in others:
                    resident.tokens[end:] = (token,)  # in place of what was expected, or new
                    resident.kv_len = end
        if not others:
            return StepResult(
                step=step,
                slot=crowd.slot,
                open_id=crowd.open_id,
                n_new=crowd.ones,
                tokens=col(outcomes.tokens),
                kv_len=runs.end,
                started_ns=started_ns,
                finished_ns=time.monotonic_ns(),
                failed=[],
                logprobs=None,
                prompts=[],
                drafted=EMPTY,
                depth=EMPTY,
            )
        n_new, done = np.ones(len(runs), np.int32), np.ones(len(runs), np.bool_)
        drafted, depth = np.zeros((2, len(runs)), np.int32)
        for i, outcome in others.items():
            n_new[i], drafted[i], depth[i] = len(outcome.tokens), outcome.drafted, outcome.depth
            done[i] = outcome.failure is None
        told = sorted((i, outcome) for i, outcome in others.items() if outcome.failure is None)
        return StepResult(
            step=step,
            slot=crowd.slot[done],
            open_id=crowd.open_id[done],
            n_new=n_new[done],
            tokens=col(outcomes.said()),
            kv_len=(runs.end + np.maximum(n_new - 1, 0))[done],
            started_ns=started_ns,
            finished_ns=time.monotonic_ns(),
            failed=[
                Failed(runs[i].slot, runs[i].resident.open_id, outcome.failure)
                for i, outcome in sorted(others.items())
                if outcome.failure is not None
            ],
            logprobs=outcomes.logprobs() if any(runs[i].resident.sampling.logprobs >= 0 for i, _ in told) else None,
            prompts=[
                ChunkLogprobs(runs[i].resident.open_id, runs[i].start + 1, outcome.prompt)
                for i, outcome in told
                if outcome.prompt is not None
            ],
            drafted=drafted[done] if drafted.any() else EMPTY,
            depth=depth[done] if (depth != drafted).any() else EMPTY,
        )

    def _known(self, runs: Runs) -> _Crowd:
        """Most steps are of those of the step before."""
        residents = runs.residents
        if residents is not self._crowd.residents and residents != self._crowd.residents:
            open_ids = col([resident.open_id for resident in residents])
            tokens = [resident.tokens for resident in residents]
            self._crowd = _Crowd(residents, tokens, runs.slot, open_ids, np.ones(len(residents), np.int32))
        return self._crowd

    def _unfit(self, resident: Resident) -> str | None:
        ids = resident.tokens
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            return f"a token id is outside of the model's vocabulary [0, {self._vocab_size})"
        if (adapter := resident.adapter) is not None:
            return "this executor has no LoRA adapters" if self._adapters is None else self._adapters.missing(adapter)
        return None

    def _settle(self, run: Run, outcome: Outcome) -> None:
        """Bring the resident to where the plan's author takes it to be, also when it failed: its next step may be
        on the way already."""
        resident, said = run.resident, outcome.tokens
        if outcome.failure is not None:
            self._failed[resident] = outcome.failure
            said = (0,) * run.samples
        expected = run.samples and len(resident.tokens) > run.end
        resident.tokens[run.end : run.end + expected] = said
        resident.kv_len = max(resident.kv_len, run.end + max(0, len(outcome.tokens) - 1))
