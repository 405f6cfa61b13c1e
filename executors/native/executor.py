"""The native executor: bound steps become one call into the step library each.

Every token's numbers come from its own sequence alone, in one fixed order of sums, in both modes: what a request
gets does not depend on its neighbours, on chunks, blocks, threads or cache hits. Mode `exact` keeps activations and
KV in fp32; `fast` has int8 activations where weights are 4-bit or 8-bit, and a bf16 KV pool.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Self

import msgspec

from octavo.core.config.schema import Config
from octavo.core.grammar import GrammarError, Grammars
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Host, Took
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.drafting.verification import agreed, verify
from octavo.executors.facts import check_memory, model_facts
from octavo.executors.grammars import Matchers, grammars_of
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.native.batch import Ask, batch
from octavo.executors.native.drawing import draw, only_warm
from octavo.executors.native.ledger import weights_bytes, workspace_bytes
from octavo.executors.native.library import Floats, Int32s, Isa, Kind, int32s, load
from octavo.executors.native.program import Native, Outputs, Pool, Weights, kv_bytes
from octavo.executors.native.stacks import Stacks, taken
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Residents, Run
from octavo.executors.sampling import Context, logprob
from octavo.executors.threads import default_threads


class NativeExecutor:
    """Entry point `native` of `octavo.executor`."""

    def __init__(
        self, model: Native, facts: Facts, grammars: Grammars | None = None, drafting: Drafting | None = None
    ) -> None:
        self.facts = facts
        self.model = model
        self._residents = Residents()
        self._matchers = Matchers(grammars)
        self._settlement = Settlement(facts.vocab_size)
        self._drafting = drafting or Drafting(None, facts.vocab_size)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` when there is no such model, it does not fit, or the drafter wants what is not offered
        here; `BuildError` without a compiler."""
        files = locate(config.model.path)
        library = load()
        checkpoint = open_checkpoint(files)
        mode, exact = config.executor.mode, config.executor.mode == "exact"
        kind = _kv_kind(config)
        threads, isa = config.executor.threads or default_threads(), Isa(library.oct_isa_best())
        how = ", ".join([mode, *_unusual(config), isa.name, f"{threads} threads"])
        facts = model_facts(
            config,
            files.model_id,
            checkpoint.spec,
            token_bytes=kv_bytes(checkpoint.spec, kind),
            seed=checkpoint.digest + f"native {mode} {config.executor.weights} {kind.name}".encode(),
            serves=("prompt_logprobs", "restrictions"),
        )
        check_memory(facts, facts.block_bytes)
        if (grammars := grammars_of(config, files, facts.vocab_size)) is not None:
            facts = msgspec.structs.replace(facts, serves=(*facts.serves, "grammar"))
        weights = Weights(library, checkpoint, exact=exact, wanted=config.executor.weights, context=facts.context)
        model = Native(weights, Pool(facts.total_blocks, facts.block_size, kind), threads, isa)
        facts = msgspec.structs.replace(
            facts,
            executor=how,
            weights_bytes=weights_bytes(weights),
            workspace_bytes=workspace_bytes(weights, config.scheduler.chunk_budget),
        )
        stacks = Stacks(model, facts, config.executor.weights)
        drafting = Drafting.of(Host(config, facts, stacks.target, stacks.open, claim=stacks.claim))
        return cls(model, stacks.counted(facts), grammars, drafting)

    def forget(self) -> None:
        self._residents.clear()
        self._settlement.clear()
        self._drafting.forget()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self._residents.apply(plan, bind)
        drafts = self._drafting.drafts(bind, runs, self._residents)
        took: list[Took] = []
        outcomes = self._compute(runs, drafts, (int32s(bind.copy_src), int32s(bind.copy_dst)), took)
        result = self._settlement.result(plan.step, started, runs, outcomes)
        self._drafting.took(took)
        return result

    def _compute(
        self, runs: list[Run], drafts: list[Draft], copies: tuple[Int32s, Int32s], took: list[Took]
    ) -> list[Outcome]:
        """Outcomes in the order of `runs`, and in `took` what was computed, if the drafter wants to know."""
        outcomes = self._settlement.refused(runs)
        sound = [i for i, outcome in enumerate(outcomes) if outcome.failure is None]
        inputs, asks = batch([runs[i] for i in sound], [drafts[i] for i in sound], copies)
        out = self.model.step(inputs, hidden=self._drafting.features)
        poisoned: list[int] = []
        for i, ask in zip(sound, asks, strict=True):
            if _own_finite(runs[i], ask, out):
                outcomes[i] = self._outcome(runs[i], drafts[i], ask, out)
            elif drafts[i].tokens:
                poisoned.append(i)
            else:
                outcomes[i] = Outcome(
                    f"the model's numbers for positions [{runs[i].start}, {runs[i].end}) are not finite"
                )
        if out.hidden is not None:
            told = [(runs[i], outcomes[i], ask.start) for i, ask in zip(sound, asks, strict=True) if i not in poisoned]
            took += taken([each for each in told if each[1].failure is None], out.hidden)
        if poisoned:  # perhaps by a guess, in one tile with it: a run is judged by its own tokens
            none = int32s([])
            alone = self._compute([runs[i] for i in poisoned], [NO_DRAFT] * len(poisoned), (none, none), took)
            for i, outcome in zip(poisoned, alone, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _outcome(self, run: Run, draft: Draft, ask: Ask, out: Outputs) -> Outcome:
        """Of a run whose own numbers are finite: a guess whose are not ends the guesses, nothing else."""
        finite = out.sample_finite[ask.sample : ask.sample + ask.samples]
        sound = len(finite) if all(finite) else finite.index(False)
        if ask.logits >= 0:
            return self._say(run, draft, ask.about, out.logits[ask.logits : ask.logits + sound])
        if not run.samples:
            return Outcome()
        best = out.best[ask.sample : ask.sample + sound].tolist()
        new = best[: agreed(best, list(draft.tokens[: sound - 1]))]
        return Outcome(None, tuple(new), (None,) * len(new), drafted=len(draft.tokens))

    def _say(self, run: Run, draft: Draft, about: int, logits: Floats) -> Outcome:
        """`logits` are of `about` positions of the prompt, then of the run's last token and its guesses."""
        resident, sampling = run.resident, run.resident.sampling
        after = resident.tokens[run.start + 1 :]
        prompt = [logprob(logits[j], after[j], sampling.prompt_logprobs) for j in range(about)] if about else None
        if not run.samples:
            return Outcome(prompt=prompt)
        rows = logits[about:]
        try:
            new = self._new(run, draft, rows)
        except GrammarError as error:
            return Outcome(str(error))
        wanted = sampling.logprobs
        entries = [logprob(row, token, wanted) if wanted >= 0 else None for row, token in zip(rows, new, strict=False)]
        return Outcome(None, tuple(new), tuple(entries), prompt, len(draft.tokens))

    def _new(self, run: Run, draft: Draft, rows: Floats) -> list[int]:
        """The tokens that the rows yield. Raises `GrammarError`."""
        resident, rule = run.resident, self._drafting.rule
        sampling, known = resident.sampling, len(resident.tokens)
        if only_warm(sampling) and (rule == "coupled" or not draft.tokens):
            drawn = [draw(self.model, row, sampling, resident.choice, known + i) for i, row in enumerate(rows)]
            return drawn[: agreed(drawn, draft.tokens[: len(rows) - 1])]
        context = Context(sampling, resident.choice, resident.prompt_len, resident.tokens)
        return verify(rows, draft, context, rule, partial(self._matchers.mask, resident))


def _own_finite(run: Run, ask: Ask, out: Outputs) -> bool:
    """Whether all numbers of the run's own tokens are, whatever its guesses' are."""
    certain = ask.sample + ask.about + run.samples
    return all(out.finite[ask.start : ask.own]) and all(out.sample_finite[ask.sample : certain])


def _kv_kind(config: Config) -> Kind:
    """Raises `ModelError` for what is not exact in exact mode."""
    exact, asked = config.executor.mode == "exact", config.executor.kv
    if exact and asked not in ("auto", "fp32"):
        raise ModelError(f'executor.kv = "{asked}" is not exact; set executor.mode = "fast", or leave it out')
    return {"auto": Kind.F32 if exact else Kind.BF16, "fp32": Kind.F32, "bf16": Kind.BF16, "int8": Kind.I8}[asked]


def _unusual(config: Config) -> list[str]:
    """What is not as the mode has it."""
    weights, kv = config.executor.weights, config.executor.kv
    return [f"weights {weights}"] * (weights != "file") + [f"KV {kv}"] * (kv != "auto")
