"""The native executor: bound steps become one call into the step library each.

Every token's numbers come from its own sequence alone, in one fixed order of sums, in both modes: what a request
gets does not depend on its neighbours, on chunks, blocks, threads or cache hits. Mode `exact` keeps activations and
KV in fp32; `fast` has int8 activations where weights are 4-bit or 8-bit, and a bf16 KV pool. On processors with AMX
`fast` computes the tokens of a request's prompt in bf16, wherever and whenever it does so (`executor.prompts`), and the
cache keeps a prompt's tokens apart from the same ones generated.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Self

import msgspec
import numpy as np

from octavo.core.config.schema import Config
from octavo.core.grammar import GrammarError, Grammars
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult, TokenLogprob
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.adapters import Adapters, numbered
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Host, Took
from octavo.executors.drafting.drafting import Drafting, settled
from octavo.executors.drafting.tree import depth, kept, path
from octavo.executors.drafting.verification import verify, walk
from octavo.executors.facts import check_memory, kept_as, model_facts
from octavo.executors.grammars import Matchers, grammars_of
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.loading.peft import Lora, read
from octavo.executors.native.adapters import Packed
from octavo.executors.native.batch import Ask, batch, best_is_enough, singles
from octavo.executors.native.drawing import Drawing, Draws, Reported
from octavo.executors.native.ledger import weights_bytes, workspace_bytes
from octavo.executors.native.library import Floats, Int32s, Isa, Kind, int32s, load
from octavo.executors.native.program import Native, Outputs, Pool, kv_bytes
from octavo.executors.native.stacks import Stacks, taken
from octavo.executors.native.weights import Weights
from octavo.executors.outcome import Outcome, Outcomes, Settlement
from octavo.executors.residents import Resident, Residents, Run, Runs, slots_of
from octavo.executors.rounds import always, in_rounds
from octavo.executors.sampling import Context
from octavo.executors.threads import default_threads

TELL_EVERY_MS = 50.0
"""Other processes run on the cores that compute: what they take for each telling a step waits for."""
_NOTHING = Outcome()


class _Heard(NamedTuple):
    """A run whose logits are there: of `about` positions of the prompt, then of its last token and its guesses."""

    run: Run
    draft: Draft
    about: int
    logits: Floats


class NativeExecutor:
    """Entry point `native` of `octavo.executor`.

    It begins a step when it has told of the one before. Begun ahead, on a thread of the library, steps were no faster
    where threads take all cores: what was told then took its time out of the step under way (two cores, two looks, of
    the rate before: 0.93 and 0.98 with one stream, 1.05 and 0.94 with 8, 0.97 and 1.03 with 32)."""

    def __init__(
        self,
        model: Native,
        facts: Facts,
        grammars: Grammars | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.facts = facts
        self.model = model
        self.go_on = always
        self._residents = Residents()
        spec, library = model.weights.spec, model.weights.library
        self.adapters: Adapters[Lora, Packed] = Adapters(
            partial(read, spec=spec),
            partial(Packed, library, spec=spec),
            self._residents.adapters,
            attrgetter("nbytes"),
        )
        self._matchers = Matchers(grammars)
        self._settlement = Settlement(facts.vocab_size, self.adapters)
        self._drafting = drafting or Drafting(None, facts.vocab_size)
        self._drawing = Drawing(model)
        self._crowd: tuple[list[Resident], bool] = [], False
        """Who was computed last, and whether the best tokens of all of them are enough."""

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` when there is no such model, it does not fit, or the drafter wants what is not offered
        here; `BuildError` without a compiler."""
        config = settled(config, "ngram")
        files = locate(config.model.path)
        library = load()
        checkpoint = open_checkpoint(files)
        mode, exact = config.executor.mode, config.executor.mode == "exact"
        kind = _kv_kind(config)
        threads, isa = config.executor.threads or default_threads(), Isa(library.oct_isa_best())
        how = ", ".join([mode, *_unusual(config), isa.name, f"{threads} threads"])
        arithmetic = [mode, config.executor.weights, kind.name, isa.name, config.executor.prompts]
        facts = model_facts(
            config,
            files.model_id,
            checkpoint.spec,
            token_bytes=kv_bytes(checkpoint.spec, kind),
            seed=checkpoint.digest + " ".join(["native", *arithmetic]).encode(),
            serves=("prompt_logprobs", "restrictions", "adapters", "rounds"),
        )
        check_memory(facts, facts.block_bytes)
        if (grammars := grammars_of(config, files, facts.vocab_size)) is not None:
            facts = msgspec.structs.replace(facts, serves=(*facts.serves, "grammar"))
        weights = Weights(library, checkpoint, exact=exact, wanted=config.executor.weights, context=facts.context)
        model = Native(weights, Pool(facts.places, facts.block_size, kind), threads, isa)
        most = min(config.scheduler.chunk_budget, facts.total_blocks * facts.block_size)  # each has a cell of its own
        model.ready(most)
        facts = msgspec.structs.replace(
            facts,
            executor=how,
            tell_every_ms=TELL_EVERY_MS,
            prompts_apart=model.own_prompts and config.executor.prompts == "apart",
            weights_bytes=weights_bytes(weights),
            workspace_bytes=workspace_bytes(weights, most),
        )
        stacks = Stacks(model, facts, config.executor.weights)
        drafting = Drafting.of(
            Host(config, facts, stacks.target, stacks.open, trees=True, claim=stacks.claim, taps=True)
        )
        return cls(model, stacks.counted(facts), grammars, drafting)

    @property
    def stats(self) -> dict[str, int]:
        return self._drafting.stats

    def forget(self) -> None:
        self._residents.clear()
        self._settlement.clear()
        self._drafting.forget()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self._residents.apply(plan, bind)
        if len(bind.copy_src):  # before the drafter: it may write into blocks that are on their way out
            self.model.copy_blocks(int32s(bind.copy_src), int32s(bind.copy_dst))
        drafts = self._drafting.drafts(bind, runs, self._residents)
        if plan.rounds == 1:
            return self._pass(plan.step, started, runs, drafts)
        return in_rounds(
            runs, plan.rounds, lambda on: self._pass(plan.step, started, on, [NO_DRAFT] * len(on)), self.go_on
        )

    def _pass(self, step: int, started_ns: int, runs: Runs, drafts: list[Draft]) -> StepResult:
        took: list[Took] = []
        outcomes = self._compute(runs, drafts, took)
        result = self._settlement.result(step, started_ns, runs, outcomes)
        self._drafting.took(took)
        return result

    def _compute(self, everyone: Runs, drafts: list[Draft], took: list[Took]) -> Outcomes:
        """Outcomes of the runs, and in `took` what was computed, if the drafter wants to know."""
        refused = self._settlement.refused(everyone)
        if not refused and self._simple(everyone, drafts):
            out = self.model.step(singles(everyone, self.facts.block_size))
            if all(out.finite) and all(out.sample_finite):
                return Outcomes(out.best.tolist(), {})
        runs = list(everyone)
        outcomes = [refused.get(i, _NOTHING) for i in range(len(runs))]
        sound = [i for i in range(len(runs)) if i not in refused]
        inputs, asks = batch([runs[i] for i in sound], [drafts[i] for i in sound], self.facts.prompts_apart)
        adapters, loaded = self._adapters([runs[i] for i in sound], asks)
        features, taps = self._drafting.features, self._drafting.taps
        out = self.model.step(inputs, hidden=features, taps=taps, adapters=adapters, loaded=loaded)
        poisoned: list[int] = []
        heard: dict[int, _Heard] = {}
        best, every = out.best.tolist(), all(out.finite) and all(out.sample_finite)
        for i, ask in zip(sound, asks, strict=True):
            if every or _own_finite(runs[i], ask, out):
                finite = out.sample_finite[ask.sample : ask.sample + ask.samples]
                certain = len(finite) if every or all(finite) else finite.index(False)  # it ends the guesses
                if ask.logits < 0:
                    outcomes[i] = _greedy(runs[i], drafts[i], best[ask.sample : ask.sample + certain])
                else:
                    logits = out.logits[ask.logits : ask.logits + certain]
                    heard[i] = _Heard(runs[i], drafts[i], ask.about, logits)
            elif drafts[i].tokens:
                poisoned.append(i)
            else:
                outcomes[i] = Outcome(
                    f"the model's numbers for positions [{runs[i].start}, {runs[i].end}) are not finite"
                )
        for i, outcome in zip(heard, self._say(list(heard.values())), strict=True):
            outcomes[i] = outcome
        if features or any(draft.parents is not None for draft in drafts):
            done = (i for i in sound if outcomes[i].failure is None and i not in poisoned)
            stay = {i: kept(runs[i], drafts[i], outcomes[i].tokens) for i in done}
            self._straighten([(runs[i], rows) for i, rows in stay.items() if drafts[i].parents is not None])
            if out.hidden is not None:
                starts = {i: ask.start for i, ask in zip(sound, asks, strict=True)}
                told = [(runs[i], [starts[i] + row for row in rows]) for i, rows in stay.items()]
                took += taken(told, out.hidden, out.inner)
        if poisoned:  # perhaps by a guess, in one tile with it: a run is judged by its own tokens
            alone = self._compute(everyone.picked(poisoned), [NO_DRAFT] * len(poisoned), took)
            for at, i in enumerate(poisoned):
                outcomes[i] = alone.at(at)
        return Outcomes.of(outcomes)

    def _simple(self, runs: Runs, drafts: list[Draft]) -> bool:
        """Whether each says the best token after an output's last one, and nobody wants to know more: as in nearly
        every step of greedy decodes."""
        if (
            not runs
            or not runs.single
            or runs.adapted
            or self._drafting.features
            or any(draft.tokens for draft in drafts)
        ):
            return False
        residents = runs.residents
        if residents is not self._crowd[0]:
            self._crowd = residents, all(map(best_is_enough, residents))
        after = (resident.prompt_len for resident in residents)
        return self._crowd[1] and all(map(int.__ge__, runs.start.tolist(), after))

    def _straighten(self, branched: list[tuple[Run, list[int]]]) -> None:
        """Bring the KV of tokens that stay to the cells of their positions: a tree gives cells out in its own order."""
        if not branched:
            return
        size = self.facts.block_size
        tables = [(run.resident.table, run.start, np.array(rows)) for run, rows in branched]
        source = [slots_of(table, start + rows, size) for table, start, rows in tables]
        target = [slots_of(table, start + np.arange(len(rows)), size) for table, start, rows in tables]
        self.model.copy_cells(int32s(np.concatenate(source)), int32s(np.concatenate(target)))

    def _adapters(self, runs: list[Run], asks: list[Ask]) -> tuple[Int32s | None, list[Packed]]:
        """By token, which of the adapters it has; None where nobody has any."""
        adapters, having = numbered([run.resident.adapter for run in runs])
        if not adapters:
            return None, []
        by_token = np.repeat(int32s(having), [ask.stop - ask.start for ask in asks])
        return int32s(by_token), [self.adapters.of(adapter) for adapter in adapters]

    def _say(self, heard: list[_Heard]) -> list[Outcome]:
        """All draws in one call, and all log-probabilities in another."""
        at_once = [i for i, one in enumerate(heard) if one.run.samples and self._at_once(one)]
        asked = (heard[i] for i in at_once)
        rows = [Draws(one.run.resident, one.logits[one.about :], one.draft.tokens) for one in asked]
        drawn = dict(zip(at_once, self._drawing.draw(rows), strict=True)) if rows else {}
        new: list[list[int]] = []
        failures: dict[int, str] = {}
        for i, one in enumerate(heard):
            try:
                new.append(self._new(one, drawn.get(i)) if one.run.samples else [])
            except GrammarError as error:
                failures[i] = str(error)
                new.append([])
        reports = [[*_of_prompt(one), *_of_answer(one, tokens)] for one, tokens in zip(heard, new, strict=True)]
        entries = iter(self._drawing.likely(flat) if (flat := list(itertools.chain(*reports))) else ())
        outcomes = []
        for i, (one, tokens) in enumerate(zip(heard, new, strict=True)):
            prompt = [next(entries) for _ in range(one.about)] if one.about else None
            if one.run.resident.sampling.logprobs >= 0:
                said: tuple[TokenLogprob | None, ...] = tuple(next(entries) for _ in tokens)
            else:
                said = (None,) * len(tokens)
            drafted, deep = (len(one.draft.tokens), depth(one.draft)) if one.run.samples else (0, 0)
            failure = failures.get(i)
            outcomes.append(Outcome(failure) if failure else Outcome(None, tuple(tokens), said, prompt, drafted, deep))
        return outcomes

    def _at_once(self, one: _Heard) -> bool:
        """Whether its rows can be drawn from without knowing which of the guesses before them are right."""
        if one.draft.parents is not None:  # of a tree, only a branch of them is drawn from
            return False
        coupled = self._drafting.rule == "coupled" or not one.draft.tokens
        return coupled and one.run.resident.sampling.grammar is None

    def _new(self, one: _Heard, drawn: list[int] | None) -> list[int]:
        """The tokens that the rows yield. Raises `GrammarError`."""
        rows, draft, resident = one.logits[one.about :], one.draft, one.run.resident
        if drawn is not None:
            return walk(len(drawn), draft, lambda row, _: drawn[row])
        context = Context(resident.sampling, resident.choice, resident.prompt_len, resident.tokens)
        mask = partial(self._matchers.mask, resident)
        return verify(rows, draft, context, self._drafting.rule, mask, self._drawing.sample)


def _greedy(run: Run, draft: Draft, best: list[int]) -> Outcome:
    """`best` are the best tokens after its last one and after each of its guesses."""
    if not run.samples:
        return Outcome()
    new = walk(len(best), draft, lambda row, _: best[row])
    return Outcome(None, tuple(new), (None,) * len(new), drafted=len(draft.tokens), depth=depth(draft))


def _of_prompt(one: _Heard) -> list[Reported]:
    """The positions of the prompt that its log-probabilities are about."""
    after, wanted = one.run.resident.tokens[one.run.start + 1 :], one.run.resident.sampling.prompt_logprobs
    return [Reported(one.logits[i], after[i], wanted) for i in range(one.about)]


def _of_answer(one: _Heard, tokens: list[int]) -> list[Reported]:
    if (wanted := one.run.resident.sampling.logprobs) < 0 or not tokens:
        return []
    rows = (one.about, *(one.about + 1 + node for node in path(one.draft, tokens)))  # after the guess before each token
    return [Reported(one.logits[row], token, wanted) for row, token in zip(rows, tokens, strict=True)]


def _own_finite(run: Run, ask: Ask, out: Outputs) -> bool:
    """Whether all numbers of the run's own tokens are, whatever its guesses' are."""
    certain = ask.sample + ask.about + run.samples
    return all(out.finite[ask.start : ask.own]) and all(out.sample_finite[ask.sample : certain])


def _kv_kind(config: Config) -> Kind:
    """Raises `ModelError` for what is not exact in exact mode."""
    exact, asked = config.executor.mode == "exact", config.executor.kv
    kinds = {"auto": Kind.F32 if exact else Kind.BF16, "fp32": Kind.F32, "bf16": Kind.BF16, "int8": Kind.I8}
    kind = kept_as(config, kinds, "native")
    if exact and kind is not Kind.F32:
        raise ModelError(f'executor.kv = "{asked}" is not exact; set executor.mode = "fast", or leave it out')
    return kind


def _unusual(config: Config) -> list[str]:
    """What is not as the mode has it."""
    weights, kv = config.executor.weights, config.executor.kv
    return [f"weights {weights}"] * (weights != "file") + [f"KV {kv}"] * (kv != "auto")
