"""A plan of several rounds, computed as so many steps in a row: shared by the executors that serve `rounds`.

Every round is a step as any other, of those who are not at their end; so each sequence says what it would say in single
steps. Only the telling is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from octavo.core.messages import StepResult, TokenLogprob, col
from octavo.executors.residents import Runs


def always() -> bool:
    """Nobody waits."""
    return True


def in_rounds(runs: Runs, rounds: int, compute: Callable[[Runs], StepResult], go_on: Callable[[], bool]) -> StepResult:
    """`compute` settles one round of some of the runs, which say a token each; of a further one `go_on` is asked first.
    Who has ended in a step that its plan's author had not heard of says nothing more."""
    if rounds == 1:
        return compute(runs)
    runs = runs.picked([i for i, resident in enumerate(runs.residents) if not resident.ended])
    results = [compute(runs)]
    while len(results) < rounds and go_on() and len(going := _going(runs, results[-1])):
        runs = going
        results.append(compute(runs))
    return results[0] if len(results) == 1 else _together(results)


def _going(runs: Runs, result: StepResult) -> Runs:
    """Those that have neither failed nor ended, and have room for another token; with the one that they said."""
    failed = {failed.open_id for failed in result.failed}
    capacity = runs.capacity.tolist()
    on = [
        i
        for i, resident in enumerate(runs.residents)
        if not resident.ended and len(resident.tokens) <= capacity[i] and resident.open_id not in failed
    ]
    left = runs.picked(on)
    return replace(left, start=left.end, end=left.end + 1)


def _together(results: Sequence[StepResult]) -> StepResult:
    """One result of them all: a row for each of the first round's, or of those that failed later."""
    first, last = results[0], results[-1]
    rows = {open_id: i for i, open_id in enumerate(first.open_id.tolist())}
    tokens: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[TokenLogprob | None]] = [[] for _ in rows]
    kv_len = first.kv_len.copy()
    asked = any(result.logprobs is not None for result in results)
    for result in results:
        entries = result.logprobs or [None] * len(result.tokens)
        columns = result.open_id.tolist(), result.tokens.tolist(), entries, result.kv_len.tolist()
        for open_id, token, entry, written in zip(*columns, strict=True):
            row = rows[open_id]
            tokens[row].append(token)
            logprobs[row].append(entry)
            kv_len[row] = written
    return structs.replace(
        first,
        n_new=np.array([len(row) for row in tokens], dtype=np.int32),
        tokens=col([token for row in tokens for token in row]),
        kv_len=kv_len,
        finished_ns=last.finished_ns,
        rounds=len(results),
        failed=[failed for result in results for failed in result.failed],
        logprobs=[entry for row in logprobs for entry in row] if asked else None,
    )
