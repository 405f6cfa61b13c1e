"""The CPU executor: runs bound steps of a Llama-family model in fp32, each token independent of its company.

Exact mode: for a sequence, tokens are the same whatever else is in the step, however its prompt was cut into chunks
and blocks, and whether its KV was computed now, found in the cache or recomputed. `probe` makes sure of it at load.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Self

import msgspec
import torch
from torch import Tensor

from octavo.core.config.schema import Config
from octavo.core.grammar import GROUP, Engine, GrammarError, Grammars
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult, TokenLogprob
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles, locate
from octavo.core.plugins import resolve
from octavo.executors.cpu.layout import PoolShape, Span
from octavo.executors.cpu.llama import KvPool, Llama
from octavo.executors.cpu.probe import load_exact
from octavo.executors.grammars import Matchers
from octavo.executors.loading.files import load_model
from octavo.executors.loading.spec import Model
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Residents, Run, of_prompt
from octavo.executors.sampling import Context, logprob, sample

_MODE = b"exact fp32"
PROMPT_ROWS = 32


class CpuExecutor:
    """Entry point `cpu` of `octavo.executor`."""

    def __init__(self, llama: Llama, pool: KvPool, facts: Facts, grammars: Grammars | None = None) -> None:
        self.facts = facts
        self.llama = llama
        self._pool = pool
        self._residents = Residents()
        self._matchers = Matchers(grammars)
        self._settlement = Settlement(self._residents, facts.vocab_size)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` for a model that is not there, not of this family or too big, `NotExactError` when this
        machine cannot be exact."""
        torch.set_num_threads(config.executor.threads or len(os.sched_getaffinity(0)))
        files = locate(config.model.path)
        model = load_model(files)
        facts = _facts(config, files, model)
        _check_memory(facts)
        with torch.inference_mode():
            shape = PoolShape(facts.total_blocks, facts.block_size, model.spec.kv_heads, model.spec.head_dim)
            grammars = _grammars(config, facts)
            if grammars is not None:
                facts = msgspec.structs.replace(facts, serves=(*facts.serves, "grammar"))
            return cls(load_exact(model), KvPool(shape, model.spec.layers), facts, grammars)

    def forget(self) -> None:
        self._residents.clear()
        self._settlement.clear()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self._residents.apply(plan, bind)
        with torch.inference_mode():
            if len(bind.copy_src):
                self._pool.copy_blocks(torch.from_numpy(bind.copy_src.copy()), torch.from_numpy(bind.copy_dst.copy()))
            outcomes = self._compute(runs)
        return self._settlement.result(plan.step, started, runs, outcomes)

    def _compute(self, runs: list[Run]) -> list[Outcome]:
        """Outcomes in the order of `runs`."""
        outcomes = self._settlement.refused(runs)
        sound = [i for i, outcome in enumerate(outcomes) if outcome.failure is None]
        if not sound:
            return outcomes
        spans = [
            Span(run.resident.tokens[run.start : run.end], run.start, run.resident.table)
            for run in (runs[i] for i in sound)
        ]
        hidden = self.llama.hidden(self.llama.layout(spans, self._pool.shape), self._pool)
        finite = _finite_rows(hidden)
        sampled: list[tuple[int, int]] = []  # (run, its last row)
        prompts: dict[int, list[TokenLogprob]] = {}
        at = 0
        for i, span in zip(sound, spans, strict=True):
            rows = slice(at, at := at + len(span.ids))
            if not all(finite[rows]):
                outcomes[i] = Outcome(_not_finite(span.start + finite[rows].index(False)))
                continue
            if about := of_prompt(runs[i]):
                prompts[i] = self._prompt(runs[i], hidden[rows][: len(about)])
            if runs[i].samples:
                sampled.append((i, at - 1))
        if sampled:
            self._sample(runs, sampled, hidden, outcomes)
        for i, entries in prompts.items():
            outcomes[i] = outcomes[i]._replace(prompt=entries)
        return outcomes

    def _prompt(self, run: Run, hidden: Tensor) -> list[TokenLogprob]:
        """What the model says of the prompt's tokens after the run's first one. Some rows at a time: a row of logits
        is as long as the vocabulary."""
        after = run.resident.tokens[run.start + 1 :]
        wanted = run.resident.sampling.prompt_logprobs
        return [
            logprob(row, after[at + i], wanted)
            for at in range(0, len(hidden), PROMPT_ROWS)
            for i, row in enumerate(self.llama.logits(hidden[at : at + PROMPT_ROWS]).numpy())
        ]

    def _sample(self, runs: list[Run], sampled: list[tuple[int, int]], hidden: Tensor, outcomes: list[Outcome]) -> None:
        logits = self.llama.logits(hidden[[row for _, row in sampled]])
        finite = _finite_rows(logits)
        for (i, _), row, sound in zip(sampled, logits.numpy(), finite, strict=True):
            resident = runs[i].resident
            if not sound:
                outcomes[i] = Outcome(_not_finite(runs[i].end - 1))
                continue
            try:
                mask = self._matchers.mask(resident)
            except GrammarError as error:
                outcomes[i] = Outcome(str(error))
                continue
            context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens, mask)
            token = sample(row, context)
            wanted = resident.sampling.logprobs
            outcomes[i] = Outcome(None, (token,), (logprob(row, token, wanted) if wanted >= 0 else None,))


def _grammars(config: Config, facts: Facts) -> Grammars | None:
    """None for a model that has no tokenizer: it answers in ids, which no grammar is about."""
    engine: Engine = resolve(GROUP, config.executor.grammar)()
    try:
        return engine.load(config.model.path, facts.vocab_size)
    except ModelError:
        return None


def _facts(config: Config, files: ModelFiles, model: Model) -> Facts:
    spec, size = model.spec, config.kv.block_size
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
        block_bytes=2 * spec.layers * spec.kv_heads * spec.head_dim * 4 * size,
        cache_seed=hashlib.sha256(model.digest + _MODE).digest()[:16],
        serves=("prompt_logprobs", "restrictions"),
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


def _finite_rows(x: Tensor) -> list[bool]:
    least, most = x.aminmax(dim=-1)
    finite: list[bool] = (least.isfinite() & most.isfinite()).tolist()
    return finite


def _not_finite(position: int) -> str:
    return f"the model's numbers at position {position} are not finite"
