"""The native executor: bound steps become one call into the step library each.

Every token's numbers come from its own sequence alone, in one fixed order of sums, in both modes: what a request
gets does not depend on its neighbours, on chunks, blocks, threads or cache hits. Mode `exact` keeps activations and
KV in fp32; `fast` has int8 activations where weights are 4-bit or 8-bit, and a bf16 KV pool.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Self

import numpy as np

from octavo.core.config.schema import Config
from octavo.core.messages import Facts, Sampling, StepBind, StepPlan, StepResult
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles, locate
from octavo.executors.loading.spec import Spec
from octavo.executors.native.checkpoint import Checkpoint, open_checkpoint
from octavo.executors.native.library import Int32s, Kind, int32s, load
from octavo.executors.native.program import Inputs, Native, Pool, Weights, kv_bytes
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Residents, Run
from octavo.executors.sampling import Context, logprob, sample


class NativeExecutor:
    """Entry point `native` of `octavo.executor`."""

    def __init__(self, model: Native, facts: Facts) -> None:
        self.facts = facts
        self.model = model
        self._residents = Residents()
        self._settlement = Settlement(self._residents, facts.vocab_size)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` when there is no such model or it does not fit, `BuildError` without a compiler."""
        files = locate(config.model.path)
        library = load()
        checkpoint = open_checkpoint(files)
        exact = config.executor.mode == "exact"
        kind = Kind.F32 if exact else Kind.BF16
        facts = _facts(config, files, checkpoint, kind)
        _check_memory(facts)
        threads = config.executor.threads or len(os.sched_getaffinity(0))
        weights = Weights(library, checkpoint, exact=exact)
        return cls(Native(weights, Pool(facts.total_blocks, facts.block_size, kind), threads), facts)

    def forget(self) -> None:
        self._residents.clear()
        self._settlement.clear()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self._residents.apply(plan, bind)
        outcomes = self._compute(runs, int32s(bind.copy_src), int32s(bind.copy_dst))
        return self._settlement.result(plan.step, started, runs, outcomes)

    def _compute(self, runs: list[Run], copy_source: Int32s, copy_target: Int32s) -> list[Outcome]:
        """Outcomes in the order of `runs`."""
        outcomes = self._settlement.refused(runs)
        sound = [i for i, outcome in enumerate(outcomes) if outcome.failure is None]
        sampled = [i for i in sound if runs[i].samples]
        inputs = _inputs([runs[i] for i in sound], copy_source, copy_target)
        best, sample_finite, logits, finite = self.model.step(inputs)
        at = 0
        for i in sound:
            rows = finite[at : at + runs[i].end - runs[i].start]
            at += len(rows)
            if not all(rows):
                outcomes[i] = Outcome(_not_finite(runs[i]))
        for j, i in enumerate(sampled):
            if outcomes[i].failure is not None:
                continue
            if not sample_finite[j]:
                outcomes[i] = Outcome(_not_finite(runs[i]))
            elif (row := int(inputs.logit_rows[j])) < 0:
                outcomes[i] = Outcome(None, (int(best[j]),), (None,))
            else:
                resident = runs[i].resident
                wanted = resident.sampling.logprobs
                context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens)
                token = sample(logits[row], context)
                entry = logprob(logits[row], token, wanted) if wanted >= 0 else None
                outcomes[i] = Outcome(None, (token,), (entry,))
        return outcomes


def _inputs(runs: list[Run], copy_source: Int32s, copy_target: Int32s) -> Inputs:
    ids: list[int] = []
    tables: list[int] = []
    table_start = [0]
    last_rows: list[int] = []
    logit_rows: list[int] = []
    rows = 0
    for run in runs:
        ids += run.resident.tokens[run.start : run.end]
        tables += run.resident.table
        table_start.append(len(tables))
        if run.samples:
            last_rows.append(len(ids) - 1)
            logit_rows.append(-1 if _best_is_enough(run.resident.sampling) else rows)
            rows += logit_rows[-1] >= 0
    lengths = [run.end - run.start for run in runs]
    if len(ids) == len(runs):
        positions, sequences = [run.start for run in runs], list(range(len(runs)))
    else:
        positions = [position for run in runs for position in range(run.start, run.end)]
        sequences = np.repeat(np.arange(len(runs)), lengths).tolist()
    return Inputs(
        int32s(ids), int32s(positions), int32s(sequences), int32s(tables), int32s(table_start), int32s(last_rows),
        int32s(logit_rows), copy_source, copy_target,
    )  # fmt: skip


def _best_is_enough(sampling: Sampling) -> bool:
    """Greedy on the bare logits: the library's own argmax will do."""
    return (
        sampling.temperature == 0
        and sampling.logprobs < 0
        and sampling.repetition == 1.0
        and sampling.presence == 0.0
        and sampling.frequency == 0.0
    )


def _facts(config: Config, files: ModelFiles, checkpoint: Checkpoint, kind: Kind) -> Facts:
    spec: Spec = checkpoint.spec
    size = config.kv.block_size
    context = config.model.context or spec.context
    if context > spec.context:
        raise ModelError(f"model.context is {context}, but {files.model_id} was made for {spec.context} tokens")
    if (blocks := config.kv.tokens // size) < 1:
        raise ModelError(f"kv.tokens = {config.kv.tokens} holds no block of kv.block_size = {size} tokens")
    return Facts(
        model_id=config.model.name or files.model_id,
        context=context,
        vocab_size=spec.vocab_size,
        block_size=size,
        total_blocks=blocks,
        block_bytes=kv_bytes(spec, kind) * size,
        cache_seed=hashlib.sha256(checkpoint.digest + f"native {config.executor.mode}".encode()).digest()[:16],
    )


def _check_memory(facts: Facts) -> None:
    """The pool is taken lazily: without this the system would end the process long after the start."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (needed := facts.total_blocks * facts.block_bytes) > memory:
        tokens = facts.total_blocks * facts.block_size
        raise ModelError(
            f"a pool of kv.tokens = {tokens} takes {needed / 2**30:.1f} GiB for this model, the machine has "
            f"{memory / 2**30:.1f} GiB; lower kv.tokens"
        )


def _not_finite(run: Run) -> str:
    return f"the model's numbers for positions [{run.start}, {run.end}) are not finite"
