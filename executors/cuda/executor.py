"""The CUDA executor: runs bound steps of a decoder on one GPU, over a paged KV pool.

Prompts' chunks and decodes share a step. Steps of decodes alone run as recorded graphs, all others launch by launch.
Tokens are drawn and guesses verified on the device; the host reads them once a step.

In mode `fast` a token's numbers depend on how many others are in its step: by the linears (see `linear`), and by where
attention cuts contexts. In mode `exact` they do not, nor on chunks or blocks.

What it runs on is a library of kernels: a GPU's, or the emulator's. Everything else is the same code.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Self

import msgspec
import torch

from octavo.core.config.schema import Config
from octavo.core.grammar import Grammars
from octavo.core.messages import Facts, Sampling, StepBind, StepPlan, StepResult, TokenLogprob
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.drawing import Row
from octavo.executors.cuda.forward import Forward, Pass
from octavo.executors.cuda.graphs import CudaRecorder, Recorder
from octavo.executors.cuda.memory import CudaMemory, Memory, pool_blocks
from octavo.executors.cuda.speaker import Asked, Speaker
from octavo.executors.cuda.swap import HostPool
from octavo.executors.drafting.contract import NO_DRAFT, Draft, Host, Took
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.facts import check_memory, kept_as, model_facts
from octavo.executors.grammars import Matchers, grammars_of
from octavo.executors.loading.files import in_fp32, open_checkpoint
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Resident, Residents, Run, Span, of_prompt, span_of
from octavo.executors.sampling import logprob
from octavo.kernels.cuda.device import Device
from octavo.kernels.cuda.launch import Kernels

PROMPT_ROWS = 32
"""Rows of logits at a time, where every position of a prompt is asked for: a row is as long as the vocabulary."""


class CudaExecutor:
    """Entry point `cuda` of `octavo.executor`."""

    def __init__(
        self,
        forward: Forward,
        facts: Facts,
        grammars: Grammars | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.facts = facts
        self.adapters = None
        self.forward = forward
        self._host = HostPool(forward.decoder.kernels, forward.decoder.pools, facts.host_blocks)
        self._residents = Residents()
        self._settlement = Settlement(facts.vocab_size)
        self._drafting = drafting or Drafting(None, facts.vocab_size)
        self._speaker = Speaker(forward.decoder.kernels, facts.vocab_size, Matchers(grammars), self._drafting.rule)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `DeviceError` or `NvrtcError` without a GPU to run on, `ModelError` when the model does not fit."""
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        kernels = Kernels(Device(device), device)
        return cls.on(kernels, config, torch.bfloat16, CudaMemory(device), CudaRecorder())

    @classmethod
    def on(
        cls, kernels: Kernels, config: Config, dtype: torch.dtype, memory: Memory, recorder: Recorder | None = None
    ) -> Self:
        """On what `kernels` run on; without a `recorder` every step is launched. Raises `ModelError`."""
        files = locate(config.model.path)
        checkpoint = open_checkpoint(files)
        if beyond := checkpoint.spec.beyond_cuda():
            raise ModelError(
                f'{files.model_id} has {beyond}, which this executor does not; run it with executor.kind = "native"'
            )
        model = in_fp32(checkpoint)
        spec, size, mode = model.spec, config.kv.block_size, config.executor.mode
        kv = kept_as(config, {"auto": dtype, "bf16": dtype, "fp8": torch.float8_e4m3fn}, "cuda")
        if (wanted := config.kv.tokens // size) < 1:
            raise ModelError(f"kv.tokens = {config.kv.tokens} holds no block of kv.block_size = {size} tokens")
        with torch.inference_mode():
            try:
                decoder = Decoder(model, kernels, dtype, size, exact=mode == "exact", kv=kv)
                block_bytes = spec.layers * decoder.layout(1).block_bytes
                decoder.allocate(1)
            except ValueError as error:
                raise ModelError(f"{files.model_id} cannot run on CUDA kernels: {error}") from error
            worst = partial(worst_step, Forward(decoder), config)
            blocks = pool_blocks(memory, worst, block_bytes, 0 if config.kv.fit else wanted, size)
            decoder.allocate(blocks)
        grammars = grammars_of(config, files, spec.vocab_size)
        facts = model_facts(
            msgspec.structs.replace(config, kv=msgspec.structs.replace(config.kv, tokens=blocks * size)),
            files.model_id,
            spec,
            token_bytes=block_bytes // size,
            seed=model.digest + f"cuda {dtype} {kv} {mode}".encode(),
            serves=("prompt_logprobs", "restrictions", *(() if grammars is None else ("grammar",))),
        )
        check_memory(msgspec.structs.replace(facts, total_blocks=0), facts.block_bytes)
        how = [mode, *(["KV fp8"] if kv != dtype else []), str(kernels.device)]
        facts = msgspec.structs.replace(facts, executor=", ".join(how))
        return cls(Forward(decoder, recorder), facts, grammars, Drafting.of(Host(config, facts)))

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
        with torch.inference_mode():
            self._host.copy(list(zip(bind.copy_src.tolist(), bind.copy_dst.tolist(), strict=True)))
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
        spans = [span_of(runs[i], drafts[i].tokens) for i in sound]
        made = self.forward.run(spans)
        starts: dict[int, int] = {}  # run: its first row
        asked: dict[int, Asked] = {}
        rows: list[int] = []
        at = 0
        for i, span in zip(sound, spans, strict=True):
            starts[i] = at
            if runs[i].samples:
                asked[i] = Asked(runs[i], drafts[i], len(rows))
                rows += range(at + runs[i].end - runs[i].start - 1, at + len(span.ids))
            at += len(span.ids)
        said = self._speaker.say(list(asked.values()), self.forward.logits(made, rows)) if rows else []
        for i, outcome in zip(asked, said, strict=True):
            outcomes[i] = outcome
        finite = made.hidden.isfinite().all(dim=-1).tolist()
        poisoned: list[int] = []
        for i, start in starts.items():
            run, known = runs[i], finite[start : start + runs[i].end - runs[i].start]
            if not all(known):
                outcomes[i] = Outcome(
                    f"the model's numbers at position {run.start + known.index(False)} are not finite"
                )
                if drafts[i].tokens:
                    poisoned.append(i)
            elif outcomes[i].failure is None and (about := of_prompt(run)):
                outcomes[i] = outcomes[i]._replace(prompt=self._prompt(run, made, range(start, start + len(about))))
        if self._drafting.features:
            took += (
                Took(runs[i].resident, runs[i].start, made.hidden[start : start + _kept(runs[i], outcomes[i])].clone())
                for i, start in starts.items()
                if outcomes[i].failure is None
            )
        if poisoned:  # perhaps by a guess: a run is judged by its own tokens
            alone = self._compute([runs[i] for i in poisoned], [NO_DRAFT] * len(poisoned), took)
            for i, outcome in zip(poisoned, alone, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _prompt(self, run: Run, made: Pass, rows: range) -> list[TokenLogprob]:
        """What the model says of the prompt's tokens after the run's first one."""
        after = run.resident.tokens[run.start + 1 :]
        wanted = run.resident.sampling.prompt_logprobs
        return [
            logprob(row, after[at + i], wanted)
            for at in range(0, len(rows), PROMPT_ROWS)
            for i, row in enumerate(self.forward.logits(made, list(rows[at : at + PROMPT_ROWS])).cpu().numpy())
        ]


def worst_step(forward: Forward, config: Config) -> None:
    """Take the most memory that a step takes: a whole budget at the end of the longest context, beside as many decodes
    as there can be, all of which draw from penalised and masked distributions. Everything lies in block 0."""
    decoder, spec = forward.decoder, forward.decoder.spec
    context, rows = config.model.context or spec.context, config.scheduler.max_sequences
    chunk = min(config.scheduler.chunk_budget, context)
    table = [0] * -(-context // decoder.block_size)
    spans = [Span([0] * chunk, context - chunk, table)] + [Span([0], context - 1, table) for _ in range(rows)]
    made = forward.run(spans)
    logits = forward.logits(made, list(range(chunk - 1, chunk + rows)))
    sampling = Sampling(temperature=1.0, repetition=1.1, allowed=(0,), top_p=0.9)
    speaker = Speaker(decoder.kernels, spec.vocab_size, Matchers(), "coupled")
    speaker.draw([Row(Resident(0, [0], 1, 0, sampling))] * (rows + 1), logits)


def _kept(run: Run, outcome: Outcome) -> int:
    """Positions from the run's start on that stay: its own tokens, and the guesses that were right."""
    return run.end - run.start + max(0, len(outcome.tokens) - 1)
