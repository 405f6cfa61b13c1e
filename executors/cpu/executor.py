"""The CPU executor: runs bound steps of a Llama-family model in fp32, each token independent of its company.

Exact mode: for a sequence, tokens are the same whatever else is in the step, however its prompt was cut into chunks
and blocks, and whether its KV was computed now, found in the cache or recomputed. `probe` makes sure of it at load.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.core.config.schema import Config
from octavo.core.grammar import GrammarError, Grammars
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult, TokenLogprob
from octavo.core.models.locate import locate
from octavo.executors.adapters import Adapters
from octavo.executors.cpu.forward import Forward
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool, Llama, token_bytes
from octavo.executors.cpu.lora import Packed
from octavo.executors.cpu.probe import exact_adapter, load_exact
from octavo.executors.cpu.stacks import Stacks
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Host, Took
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.tree import kept, path
from octavo.executors.drafting.verification import verify
from octavo.executors.facts import PLAIN_KV, check_memory, kept_as, model_facts
from octavo.executors.grammars import Matchers, grammars_of
from octavo.executors.loading.files import load_model
from octavo.executors.loading.peft import Lora, read
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Residents, Run, of_prompt, slots_of, span_of
from octavo.executors.sampling import Context, logprob

_MODE = b"exact fp32"
PROMPT_ROWS = 32
_NOTHING = torch.empty(0)


class CpuExecutor:
    """Entry point `cpu` of `octavo.executor`."""

    def __init__(
        self,
        forward: Forward[Any],
        pool: KvPool,
        facts: Facts,
        grammars: Grammars | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.facts = facts
        self.forward = forward
        self._pool = pool
        self._residents = Residents()
        self._matchers = Matchers(grammars)
        self.adapters = self._adapters()
        self._settlement = Settlement(facts.vocab_size, self.adapters)
        self._drafting = drafting or Drafting(None, facts.vocab_size)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` for a model that is not there, not of this family or too big, `NotExactError` when this
        machine cannot be exact."""
        kept_as(config, PLAIN_KV, "cpu")
        torch.set_num_threads(config.executor.threads or len(os.sched_getaffinity(0)))
        files = locate(config.model.path)
        model = load_model(files)
        spec = model.spec
        facts = model_facts(
            config,
            files.model_id,
            spec,
            token_bytes=token_bytes(spec),
            seed=model.digest + _MODE,
            serves=("prompt_logprobs", "restrictions", "adapters"),
        )
        check_memory(facts, facts.block_bytes)
        with torch.inference_mode():
            shape = PoolShape(facts.places, facts.block_size, spec.kv_heads, spec.head_dim)
            grammars = grammars_of(config, files, facts.vocab_size)
            if grammars is not None:
                facts = msgspec.structs.replace(facts, serves=(*facts.serves, "grammar"))
            llama, pool = load_exact(model), KvPool(shape, spec.layers)
            stacks = Stacks(llama, pool, facts)
            drafting = Drafting.of(
                Host(config, facts, stacks.target, stacks.open, trees=True, claim=stacks.claim, taps=True)
            )
            facts = msgspec.structs.replace(facts, block_bytes=facts.block_bytes + stacks.block_bytes)
            return cls(llama, pool, facts, grammars, drafting)

    @property
    def stats(self) -> dict[str, int]:
        return self._drafting.stats

    def _adapters(self) -> Adapters[Lora, Packed] | None:
        """None for a model that is not computed here but by a library."""
        llama = self.forward
        if not isinstance(llama, Llama):
            return None
        with torch.inference_mode():
            llama.adapters = Adapters(
                partial(read, spec=llama.spec), partial(exact_adapter, like=llama.arithmetic), self._residents.adapters
            )
        return llama.adapters

    def forget(self) -> None:
        self._residents.clear()
        self._settlement.clear()
        self._drafting.forget()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self._residents.apply(plan, bind)
        with torch.inference_mode():
            if len(bind.copy_src):
                self._pool.copy_blocks(torch.from_numpy(bind.copy_src.copy()), torch.from_numpy(bind.copy_dst.copy()))
            took: list[Took] = []
            outcomes = self._compute(runs, self._drafting.drafts(bind, runs, self._residents), took)
            result = self._settlement.result(plan.step, started, runs, outcomes)
            self._drafting.took(took)
        return result

    def _compute(self, runs: list[Run], drafts: list[Draft], took: list[Took]) -> list[Outcome]:
        """Outcomes in the order of `runs`, and in `took` what was computed, if the drafter wants to know."""
        outcomes = self._settlement.refused(runs)
        sound = [i for i, outcome in enumerate(outcomes) if outcome.failure is None]
        if not sound:
            return outcomes
        spans = [span_of(runs[i], drafts[i].tokens, drafts[i].parents) for i in sound]
        taps = dict.fromkeys(self._drafting.taps, _NOTHING)
        hidden = self.forward.hidden(self.forward.layout(spans, self._pool.shape), self._pool, taps=taps)
        finite = _finite_rows(hidden)
        sampled: dict[int, range] = {}  # run: the rows of its last token and of its guesses
        prompts: dict[int, list[TokenLogprob]] = {}
        starts: dict[int, int] = {}
        poisoned: list[int] = []
        at = 0
        for i, span in zip(sound, spans, strict=True):
            run, starts[i] = runs[i], at
            known = finite[at : at + run.end - run.start]
            if not all(known):
                outcomes[i] = Outcome(_not_finite(span.start + known.index(False)))
                if drafts[i].tokens:
                    poisoned.append(i)
            else:
                if about := of_prompt(run):
                    prompts[i] = self._prompt(run, hidden[at : at + len(about)])
                if run.samples:
                    sampled[i] = range(at + len(known) - 1, at + len(span.ids))
            at += len(span.ids)
        if sampled:
            self._sample(runs, drafts, sampled, hidden, outcomes)
        for i, entries in prompts.items():
            outcomes[i] = outcomes[i]._replace(prompt=entries)
        done = {i: kept(runs[i], drafts[i], outcomes[i].tokens) for i in starts if outcomes[i].failure is None}
        self._straighten([(runs[i], rows) for i, rows in done.items() if drafts[i].parents is not None])
        if self._drafting.features:
            inner = torch.cat([taps[layer] for layer in self._drafting.taps], dim=-1) if taps else None
            for i, stay in done.items():
                rows = [starts[i] + row for row in stay]
                told = None if inner is None else inner[rows]
                took.append(Took(runs[i].resident, runs[i].start, hidden[rows], told))
        if poisoned:  # perhaps by a guess: a run is judged by its own tokens
            alone = self._compute([runs[i] for i in poisoned], [NO_DRAFT] * len(poisoned), took)
            for i, outcome in zip(poisoned, alone, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _straighten(self, branched: list[tuple[Run, list[int]]]) -> None:
        """Bring the KV of tokens that stay to the cells of their positions: a tree gives cells out in its own order."""
        if not branched:
            return
        size = self._pool.shape.block_size
        tables = [(run.resident.table, run.start, np.array(rows)) for run, rows in branched]
        source = [slots_of(table, start + rows, size) for table, start, rows in tables]
        target = [slots_of(table, start + np.arange(len(rows)), size) for table, start, rows in tables]
        self._pool.copy_slots(torch.from_numpy(np.concatenate(source)), torch.from_numpy(np.concatenate(target)))

    def _prompt(self, run: Run, hidden: Tensor) -> list[TokenLogprob]:
        """What the model says of the prompt's tokens after the run's first one. Some rows at a time: a row of logits
        is as long as the vocabulary."""
        after = run.resident.tokens[run.start + 1 :]
        wanted = run.resident.sampling.prompt_logprobs
        return [
            logprob(row, after[at + i], wanted)
            for at in range(0, len(hidden), PROMPT_ROWS)
            for i, row in enumerate(self.forward.logits(hidden[at : at + PROMPT_ROWS]).numpy())
        ]

    def _sample(
        self,
        runs: list[Run],
        drafts: list[Draft],
        sampled: dict[int, range],
        hidden: Tensor,
        outcomes: list[Outcome],
    ) -> None:
        logits = self.forward.logits(hidden[[row for rows in sampled.values() for row in rows]])
        finite, values = _finite_rows(logits), logits.numpy()
        at = 0
        for i, rows in sampled.items():
            sound = finite[at : at + len(rows)]
            mine = values[at : at + (len(rows) if all(sound) else sound.index(False))]
            at += len(rows)
            outcomes[i] = self._verified(runs[i], drafts[i], mine)

    def _verified(self, run: Run, draft: Draft, rows: npt.NDArray[np.float32]) -> Outcome:
        """What the finite rows say, of the run's last token and its guesses."""
        resident = run.resident
        if not len(rows):
            return Outcome(_not_finite(run.end - 1))
        context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens)
        try:
            new = verify(rows, draft, context, self._drafting.rule, partial(self._matchers.mask, resident))
        except GrammarError as error:
            return Outcome(str(error))
        wanted = resident.sampling.logprobs
        said = zip((-1, *path(draft, new)), new, strict=True)  # each token by the row of the guess before it
        entries = [logprob(rows[node + 1], token, wanted) if wanted >= 0 else None for node, token in said]
        return Outcome(None, tuple(new), tuple(entries), drafted=len(draft.tokens))


def _finite_rows(x: Tensor) -> list[bool]:
    least, most = x.aminmax(dim=-1)
    finite: list[bool] = (least.isfinite() & most.isfinite()).tolist()
    return finite


def _not_finite(position: int) -> str:
    return f"the model's numbers at position {position} are not finite"
