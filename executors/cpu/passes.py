"""A step's pass on the CPU, over a `Forward`, and its answers by the sampler itself: a `Passes` of the frame."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.core.grammar import GrammarError
from octavo.core.messages import TokenLogprob
from octavo.executors.cpu.forward import Forward
from octavo.executors.cpu.llama import KvPool
from octavo.executors.drafting.contract import Draft
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.tree import depth, path
from octavo.executors.drafting.verification import verify
from octavo.executors.frame import Asked, not_finite
from octavo.executors.grammars import Matchers
from octavo.executors.outcome import Outcome, Outcomes
from octavo.executors.residents import Run, Runs, slots_of, span_of
from octavo.executors.sampling import Context, logprob

PROMPT_ROWS = 32
_NOTHING = torch.empty(0)


class Pass(NamedTuple):
    """Last hidden states [tokens, hidden], and by layer the inputs of those that are tapped."""

    hidden: Tensor
    taps: dict[int, Tensor]


class CpuPasses:
    def __init__(self, forward: Forward[Any], pool: KvPool, matchers: Matchers, drafting: Drafting) -> None:
        self._forward, self._pool = forward, pool
        self._matchers, self._drafting = matchers, drafting

    def begin(self, runs: Runs, drafts: list[Draft], asked: Asked) -> Pass:
        spans = [span_of(run, draft.tokens, draft.parents) for run, draft in zip(runs, drafts, strict=True)]
        taps = dict.fromkeys(self._drafting.taps, _NOTHING)
        return Pass(self._forward.hidden(self._forward.layout(spans, self._pool.shape), self._pool, taps=taps), taps)

    def finite(self, made: Pass) -> list[bool]:
        return _finite_rows(made.hidden)

    def say(self, made: Pass, asked: Asked, heard: Sequence[int]) -> Outcomes:
        logits = self._forward.logits(made.hidden[[row for j in heard for row in asked.rows_of(j)]])
        finite, values = _finite_rows(logits), logits.numpy()
        outcomes = [Outcome()] * len(asked.runs)
        at = 0
        for j in heard:
            sound = finite[at : at + len(asked.rows_of(j))]
            outcomes[j] = self._verified(asked.runs[j], asked.drafts[j], values[at : at + _leading(sound)])
            at += len(sound)
        return Outcomes.of(outcomes)

    def prompt(self, made: Pass, run: Run, rows: range) -> list[TokenLogprob]:
        """Some rows at a time: a row of logits is as long as the vocabulary."""
        after, wanted = run.resident.tokens[run.start + 1 :], run.resident.sampling.prompt_logprobs
        hidden = made.hidden[rows.start : rows.stop]
        return [
            logprob(row, after[at + i], wanted)
            for at in range(0, len(hidden), PROMPT_ROWS)
            for i, row in enumerate(self._forward.logits(hidden[at : at + PROMPT_ROWS]).numpy())
        ]

    def straighten(self, branched: list[tuple[Run, list[int]]]) -> None:
        size = self._pool.shape.block_size
        tables = [(run.resident.table, run.start, np.array(rows)) for run, rows in branched]
        source = [slots_of(table, start + rows, size) for table, start, rows in tables]
        target = [slots_of(table, start + np.arange(len(rows)), size) for table, start, rows in tables]
        self._pool.copy_slots(torch.from_numpy(np.concatenate(source)), torch.from_numpy(np.concatenate(target)))

    def states(self, made: Pass, rows: list[int]) -> tuple[Tensor, Tensor | None]:
        taps = [made.taps[layer][rows] for layer in self._drafting.taps]  # one may be tapped twice
        return made.hidden[rows], torch.cat(taps, dim=-1) if taps else None

    def _verified(self, run: Run, draft: Draft, rows: npt.NDArray[np.float32]) -> Outcome:
        """What the finite rows say, of the run's last token and its guesses."""
        resident = run.resident
        if not len(rows):
            return Outcome(not_finite(run.end - 1))
        context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens)
        try:
            new = verify(rows, draft, context, self._drafting.rule, partial(self._matchers.mask, resident))
        except GrammarError as error:
            return Outcome(str(error))
        wanted = resident.sampling.logprobs
        said = zip((-1, *path(draft, new)), new, strict=True)  # each token by the row of the guess before it
        entries = [logprob(rows[node + 1], token, wanted) if wanted >= 0 else None for node, token in said]
        return Outcome(None, tuple(new), tuple(entries), drafted=len(draft.tokens), depth=depth(draft))


def _finite_rows(x: Tensor) -> list[bool]:
    least, most = x.aminmax(dim=-1)
    finite: list[bool] = (least.isfinite() & most.isfinite()).tolist()
    return finite


def _leading(sound: list[bool]) -> int:
    """How many are, before the first that is not."""
    return len(sound) if all(sound) else sound.index(False)
