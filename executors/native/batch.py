"""From the runs of a step (or a drafter's spans) to the step library's flat batch, and where each run's answers are in
what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.executors.drafting.contract import Draft
from octavo.executors.native.library import Int32s, int32s
from octavo.executors.native.program import Inputs
from octavo.executors.residents import Resident, Run, Runs, Span, of_prompt, span_of
from octavo.executors.sampling import shaped


class Ask(NamedTuple):
    """A run's tokens are [start, stop) of the batch, its own ones first, then its guesses. Its samples are the step's
    from number `sample` on: of `about` positions of the prompt, then of its last token and each guess if it samples.
    Their logits are rows from `logits` on; -1: the best tokens are enough."""

    start: int
    own: int
    stop: int
    about: int
    sample: int
    samples: int
    logits: int


def batch(runs: Sequence[Run], drafts: Sequence[Draft], own_prompts: bool = False) -> tuple[Inputs, list[Ask]]:
    """With `own_prompts` the library learns which tokens are a prompt's."""
    asks: list[Ask] = []
    ids: list[int] = []
    tables: list[int] = []
    table_start = [0]
    sample_rows: list[int] = []
    logit_rows: list[int] = []
    logits = 0
    spans = [span_of(run, draft.tokens, draft.parents) for run, draft in zip(runs, drafts, strict=True)]
    for run, span in zip(runs, spans, strict=True):
        start = len(ids)
        ids += span.ids
        own = start + run.end - run.start
        about = len(of_prompt(run))
        rows = list(range(own - 1, len(ids))) if run.samples else []
        if about:
            rows = [*range(start, start + about), *rows]
        needed = about > 0 or (run.samples and not best_is_enough(run.resident))
        asks.append(Ask(start, own, len(ids), about, len(sample_rows), len(rows), logits if needed else -1))
        sample_rows += rows
        if needed:
            logit_rows += range(logits, logits + len(rows))
            logits += len(rows)
        else:
            logit_rows += [-1] * len(rows)
        tables += run.resident.table
        table_start.append(len(tables))
    if len(ids) == len(runs):
        positions, sequences = [run.start for run in runs], list(range(len(runs)))
    else:
        lengths = [ask.stop - ask.start for ask in asks]
        positions = [position for span in spans for position in span.positions]
        sequences = np.repeat(np.arange(len(runs)), lengths).tolist()
    none = int32s([])
    inputs = Inputs(
        int32s(ids), int32s(positions), int32s(sequences), int32s(tables), int32s(table_start), int32s(sample_rows),
        int32s(logit_rows), none, none, *_paths(spans), _prompt_ends(runs) if own_prompts else None,
    )  # fmt: skip
    return inputs, asks


def singles(runs: Runs, block_size: int) -> Inputs:
    """Of runs of one output token each, whose best next ones are enough: column by column, as they come in nearly every
    step."""
    starts = runs.start.tolist()
    ids = [resident.tokens[at] for resident, at in zip(runs.residents, starts, strict=True)]
    blocks = max(starts) // block_size + 1  # of others' tables further ones are not looked at
    each = np.arange(len(ids) + 1, dtype=np.int32)
    tables = int32s(runs.tables[runs.slot, :blocks]).reshape(-1)
    rows, best, none = each[:-1], np.full(len(ids), -1, np.int32), int32s([])
    return Inputs(int32s(ids), int32s(runs.start), rows, tables, each * np.int32(blocks), rows, best, none, none)


def of_spans(spans: Sequence[Span], samples: bool = True) -> Inputs:
    """With logits of each span's last token, if `samples`."""
    lengths = [len(span.ids) for span in spans]
    none = int32s([])
    return Inputs(
        int32s([token for span in spans for token in span.ids]),
        int32s([position for span in spans for position in span.positions]),
        int32s(np.repeat(np.arange(len(spans)), lengths)),
        int32s([block for span in spans for block in span.table]),
        int32s(np.cumsum([0, *(len(span.table) for span in spans)])),
        int32s(np.cumsum(lengths) - 1) if samples else none,
        int32s(range(len(spans))) if samples else none,
        none,
        none,
        *_paths(spans),
    )


def _prompt_ends(runs: Sequence[Run]) -> Int32s | None:
    """By run; None where no token is a prompt's."""
    if all(run.start >= run.resident.prompt_len for run in runs):
        return None
    return int32s([run.resident.prompt_len for run in runs])


def _paths(spans: Sequence[Span]) -> tuple[Int32s | None, Int32s | None]:
    """Of all tokens, and where each one's begins; None where no span is a tree."""
    if all(span.paths is None for span in spans):
        return None, None
    paths = [path for span in spans for path in (span.paths or [()] * len(span.ids))]
    return int32s([cell for path in paths for cell in path]), int32s(np.cumsum([0, *map(len, paths)]))


def best_is_enough(resident: Resident) -> bool:
    """Greedy on the bare logits: the library's own argmax will do."""
    sampling = resident.sampling
    return sampling.temperature == 0 and sampling.logprobs < 0 and sampling.grammar is None and not shaped(sampling)
