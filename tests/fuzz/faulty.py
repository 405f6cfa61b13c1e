"""A ghost some of whose runs fail, as a model's do whose numbers are not finite.

What such a run writes is garbage that nobody may read, its residency stays failed, and its row is left out of the
result: as `executors.outcome` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import numpy as np
from msgspec.structs import replace

from octavo.core.messages import Facts, Failed, StepResult, TokenLogprob
from octavo.executors.ghost import GhostExecutor
from octavo.executors.residents import Resident, Run

GARBAGE = -2
WHY = "the ghost was made to fail"


class FaultyGhost(GhostExecutor):
    """`fails` says of each run whether it is to fail."""

    def __init__(self, facts: Facts, fails: Callable[[Run], bool], *, eos_one_in: int = 0) -> None:
        super().__init__(facts, eos_one_in=eos_one_in)
        self._fails = fails
        self._failed: WeakSet[Resident] = WeakSet()
        self._now: list[Run] = []
        """Of the round that is executed, the runs that fail."""

    def _pass(self, step: int, started_ns: int, runs: list[Run]) -> StepResult:
        self._now = []
        result = super()._pass(step, started_ns, runs)
        if not self._now:
            return result
        gone = [run.resident.open_id for run in self._now]
        stays = np.isin(result.open_id, gone, invert=True)
        return replace(
            result,
            slot=result.slot[stays],
            open_id=result.open_id[stays],
            n_new=result.n_new[stays],
            kv_len=result.kv_len[stays],
            drafted=result.drafted[stays] if len(result.drafted) else result.drafted,
            prompts=[chunk for chunk in result.prompts if chunk.open_id not in gone],
            failed=[Failed(run.slot, run.resident.open_id, WHY) for run in self._now],
        )

    def _execute(self, run: Run) -> list[int]:
        resident = run.resident
        self._check_columns(run)
        if resident not in self._failed and not self._fails(run):
            return super()._execute(run)
        self._failed.add(resident)
        self._now.append(run)
        for position in range(run.start, run.end):
            self._write(run, position, GARBAGE)
        resident.kv_len = run.end
        resident.tokens += [0] * run.samples
        return []

    def _prompt_logprob(self, run: Run, position: int) -> TokenLogprob:
        if run.resident in self._failed:
            return TokenLogprob(0, 0.0, [0], [0.0])  # left out of the result
        return super()._prompt_logprob(run, position)

    def _check_columns(self, run: Run) -> None:
        """The ghost reads by the residents' own tables and slots; executors of many rows by columns."""
        held = len(run.resident.table)
        columns = self.residents._tables[run.slot]
        if self.residents.slots[run.slot] is not run.resident:
            raise AssertionError(f"slot {run.slot} is run for a residency that is not in it")
        if columns[:held].tolist() != list(run.resident.table) or columns[held:].any():
            raise AssertionError(
                f"slot {run.slot} has blocks {list(run.resident.table)}, its columns {columns.tolist()}"
            )
