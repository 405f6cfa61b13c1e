"""The native executor: bound steps become one call into the step library each.

Every token's numbers come from its own sequence alone, in one fixed order of sums, in both modes: what a request
gets does not depend on its neighbours, on chunks, blocks, threads or cache hits. Mode `exact` keeps activations and
KV in fp32; `fast` has int8 activations where weights are 4-bit or 8-bit, and a bf16 KV pool.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import NamedTuple, Self

import numpy as np

from octavo.core.config.schema import Config
from octavo.core.grammar import GrammarError, Grammars
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult, TokenLogprob
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles, locate
from octavo.executors.grammars import Matchers, grammars_of, has_tokenizer
from octavo.executors.loading.spec import Spec
from octavo.executors.native.checkpoint import Checkpoint, open_checkpoint
from octavo.executors.native.library import Floats, Int32s, Isa, Kind, int32s, load
from octavo.executors.native.program import Inputs, Native, Pool, Weights, kv_bytes
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Resident, Residents, Run, of_prompt
from octavo.executors.sampling import Context, logprob, sample, shaped


class NativeExecutor:
    """Entry point `native` of `octavo.executor`."""

    def __init__(self, model: Native, facts: Facts, grammars: Grammars | None = None) -> None:
        self.facts = facts
        self.model = model
        self._residents = Residents()
        self._matchers = Matchers(grammars)
        self._settlement = Settlement(self._residents, facts.vocab_size)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` when there is no such model or it does not fit, `BuildError` without a compiler."""
        files = locate(config.model.path)
        library = load()
        checkpoint = open_checkpoint(files)
        exact = config.executor.mode == "exact"
        kind = Kind.F32 if exact else Kind.BF16
        threads = config.executor.threads or len(os.sched_getaffinity(0))
        isa = Isa(library.oct_isa_best())
        facts = _facts(config, files, checkpoint, kind, threads, isa)
        _check_memory(facts)
        weights = Weights(library, checkpoint, exact=exact)
        pool = Pool(facts.total_blocks, facts.block_size, kind)
        return cls(Native(weights, pool, threads, isa), facts, grammars_of(config, files, facts.vocab_size))

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
        asks = _asks([runs[i] for i in sound])
        inputs = _inputs([runs[i] for i in sound], asks, copy_source, copy_target)
        best, sample_finite, logits, finite = self.model.step(inputs)
        at = 0
        for i, ask in zip(sound, asks, strict=True):
            run = runs[i]
            rows = finite[at : at + run.end - run.start]
            at += len(rows)
            samples = slice(ask.sample, ask.sample + len(ask.rows))
            if not all(rows) or not all(sample_finite[samples]):
                outcomes[i] = Outcome(_not_finite(run))
            elif ask.logits < 0:
                outcomes[i] = Outcome(None, tuple(best[samples].tolist()), (None,) * len(ask.rows))
            else:
                outcomes[i] = self._say(run, logits[ask.logits : ask.logits + len(ask.rows)])
        return outcomes

    def _say(self, run: Run, logits: Floats) -> Outcome:
        """`logits` are of the prompt's positions that are asked for, then of the last one if the run samples."""
        resident = run.resident
        about = of_prompt(run)
        prompt = None
        if about:
            after, wanted = resident.tokens[run.start + 1 :], resident.sampling.prompt_logprobs
            prompt = [logprob(row, after[j], wanted) for j, row in enumerate(logits[: len(about)])]
        if not run.samples:
            return Outcome(prompt=prompt)
        try:
            mask = self._matchers.mask(resident)
        except GrammarError as error:
            return Outcome(str(error))
        token = sample(
            logits[-1], Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens, mask)
        )
        wanted = resident.sampling.logprobs
        entry: TokenLogprob | None = logprob(logits[-1], token, wanted) if wanted >= 0 else None
        return Outcome(None, (token,), (entry,), prompt)


class Ask(NamedTuple):
    """What a run wants to know of its own rows (`rows`, counted from its first one): their samples begin at number
    `sample` of the step, and their logits at row `logits` (-1: the best tokens are enough)."""

    rows: list[int]
    sample: int
    logits: int


def _asks(runs: list[Run]) -> list[Ask]:
    asks: list[Ask] = []
    samples = logits = 0
    for run in runs:
        rows = list(range(len(of_prompt(run)))) + [run.end - run.start - 1] * run.samples
        needed = bool(rows) and not (len(rows) == run.samples and _best_is_enough(run.resident))
        asks.append(Ask(rows, samples, logits if needed else -1))
        samples += len(rows)
        logits += len(rows) * needed
    return asks


def _inputs(runs: list[Run], asks: list[Ask], copy_source: Int32s, copy_target: Int32s) -> Inputs:
    ids: list[int] = []
    tables: list[int] = []
    table_start = [0]
    sample_rows: list[int] = []
    logit_rows: list[int] = []
    for run, ask in zip(runs, asks, strict=True):
        sample_rows += [len(ids) + row for row in ask.rows]
        logit_rows += range(ask.logits, ask.logits + len(ask.rows)) if ask.logits >= 0 else [-1] * len(ask.rows)
        ids += run.resident.tokens[run.start : run.end]
        tables += run.resident.table
        table_start.append(len(tables))
    lengths = [run.end - run.start for run in runs]
    if len(ids) == len(runs):
        positions, sequences = [run.start for run in runs], list(range(len(runs)))
    else:
        positions = [position for run in runs for position in range(run.start, run.end)]
        sequences = np.repeat(np.arange(len(runs)), lengths).tolist()
    return Inputs(
        int32s(ids), int32s(positions), int32s(sequences), int32s(tables), int32s(table_start), int32s(sample_rows),
        int32s(logit_rows), copy_source, copy_target,
    )  # fmt: skip


def _best_is_enough(resident: Resident) -> bool:
    """Greedy on the bare logits: the library's own argmax will do."""
    sampling = resident.sampling
    return sampling.temperature == 0 and sampling.logprobs < 0 and sampling.grammar is None and not shaped(sampling)


def _facts(config: Config, files: ModelFiles, checkpoint: Checkpoint, kind: Kind, threads: int, isa: Isa) -> Facts:
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
        executor=f"{config.executor.mode}, {isa.name}, {threads} threads",
        serves=("prompt_logprobs", "restrictions", *(("grammar",) if has_tokenizer(files) else ())),
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
