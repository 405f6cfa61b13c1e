"""The CUDA executor: runs bound steps of a decoder on one GPU, over a paged KV pool.

Prompts' chunks and decodes share a step. Steps of decodes alone run as recorded graphs, all others launch by launch.
Tokens are drawn and guesses verified on the device; the host reads them once a step, and a step later: a step begins
(is planned and launched) before the tokens of the one before it are known here, so the device need not wait. Not so
with a drafter, who guesses by the last token.

In mode `fast` a token's numbers depend on how many others are in its step: by the linears (see `linear`), and by where
attention cuts contexts. In mode `exact` they do not, nor on chunks or blocks.

What it runs on is a library of kernels: a GPU's, or the emulator's. Everything else is the same code.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Self

import msgspec
import numpy as np
import torch

from octavo.core.config.schema import Config
from octavo.core.grammar import Grammars
from octavo.core.messages import Facts, Sampling, StepBind, StepPlan, StepResult
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import absolute, locate
from octavo.executors.adapters import Adapters
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.drawing import Rows
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import CudaRecorder, Recorder
from octavo.executors.cuda.lora import Adapted, Packed, packed, size_of, widest
from octavo.executors.cuda.memory import ADAPTERS, CudaMemory, Memory, room_for
from octavo.executors.cuda.passes import CudaPasses, Made
from octavo.executors.cuda.speaker import CHANCES, Speaker
from octavo.executors.cuda.stacks import Stacks
from octavo.executors.cuda.swap import HostPool, staged_bytes
from octavo.executors.drafting.contract import Draft, Host, Took
from octavo.executors.drafting.drafting import Drafting, settled
from octavo.executors.facts import check_memory, kept_as, model_facts
from octavo.executors.frame import Begun, Frame
from octavo.executors.grammars import Matchers, grammars_of
from octavo.executors.loading.files import in_fp32, open_checkpoint
from octavo.executors.loading.peft import Lora, read
from octavo.executors.loading.spec import Spec
from octavo.executors.outcome import Settlement
from octavo.executors.residents import Resident, Residents, Span
from octavo.kernels.cuda.device import Device
from octavo.kernels.cuda.launch import Kernels
from octavo.kernels.cuda.plan import TREE
from octavo.policies.contract import MAX_DRAFTS


class CudaExecutor:
    """Entry point `cuda` of `octavo.executor`."""

    def __init__(
        self,
        forward: Forward,
        facts: Facts,
        grammars: Grammars | None = None,
        drafting: Drafting | None = None,
        adapter_bytes: int = ADAPTERS,
    ) -> None:
        """`adapter_bytes` is what adapters may take of the device's memory."""
        self.facts = facts
        self.forward = forward
        self._host = HostPool(forward.decoder.kernels, forward.decoder.pools, facts.host_blocks)
        self._residents = Residents()
        self._adapter_bytes = adapter_bytes
        self.adapters = forward.adapters = self._adapters()
        self._settlement = Settlement(facts.vocab_size, self.adapters)
        self._drafting = drafting or Drafting(None, facts.vocab_size)
        speaker = Speaker(forward.decoder.kernels, facts.vocab_size, Matchers(grammars), self._drafting.rule)
        self._passes = CudaPasses(forward, speaker, self._catch_up)
        self._frame = Frame(self._passes, self._settlement, self._drafting)
        self._under_way: UnderWay | None = None
        self._results: list[StepResult] = []
        self._ended_ns = 0

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
        config = settled(config)
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
                context, chunk = config.model.context, config.scheduler.chunk_budget
                decoder = Decoder(
                    model, kernels, dtype, size, exact=mode == "exact", kv=kv, context=context, chunk=chunk
                )
                block_bytes = spec.layers * decoder.layout(1).block_bytes
                decoder.allocate(1)
            except ValueError as error:
                raise ModelError(f"{files.model_id} cannot run on CUDA kernels: {error}") from error
        grammars = grammars_of(config, files, spec.vocab_size)
        how = [mode, *(["KV fp8"] if kv != dtype else []), str(kernels.device)]
        facts = model_facts(
            config,
            files.model_id,
            spec,
            token_bytes=block_bytes // size,
            seed=model.digest + f"cuda {dtype} {kv} {mode}".encode(),
            serves=("prompt_logprobs", "restrictions", "adapters", *(() if grammars is None else ("grammar",))),
        )
        facts = msgspec.structs.replace(facts, executor=", ".join(how), total_blocks=1)
        forward = Forward(decoder, recorder, config.scheduler.max_sequences)
        with torch.inference_mode():
            small = msgspec.structs.replace(facts, host_blocks=0)
            trial = Stacks(forward, small, kv, recorder)
            drafting = Drafting.of(host(config, small, trial))  # takes what it takes beside the pool
            beside = Forward(decoder)
            forward.taps = beside.taps = drafting.taps
            forward.record()  # so that what recording takes is not free when the pool's size is chosen
            forward.forget()
            swapped = [block_bytes, *([trial.pool_bytes] if trial.pool_bytes else [])]
            held = trial.own_bytes * facts.host_blocks
            held += sum(staged_bytes(one, facts.host_blocks) for one in swapped)
            each = block_bytes + trial.pool_bytes + trial.own_bytes
            named = _named_bytes(config, spec, dtype, forward)
            worst = partial(worst_step, beside, config)
            room = room_for(memory, worst, each, 0 if config.kv.fit else wanted, size, held + named, named)
            decoder.allocate(room.blocks)
            forward.record()
            decoder.saturated.zero_()  # of tokens that nobody has said
            facts = msgspec.structs.replace(facts, total_blocks=room.blocks)
            check_memory(msgspec.structs.replace(facts, total_blocks=0), block_bytes + trial.pool_bytes)
            del drafting
            drafting = Drafting.of(host(config, facts, trial.over(facts)))
        facts = msgspec.structs.replace(facts, block_bytes=each)
        return cls(forward, facts, grammars, drafting, room.adapters)

    def _adapters(self) -> Adapters[Lora, Packed]:
        read_ = partial(read, spec=self.forward.decoder.spec)
        return Adapters(read_, self._prepared, self._residents.adapters, attrgetter("nbytes"))

    def _prepared(self, lora: Lora) -> Packed:
        """On the device, if steps have their memory beside it. Raises `ModelError`."""
        decoder = self.forward.decoder
        self.forward.separate()  # it may have more than is held by now
        needed, held = size_of(lora, decoder.dtype, _widths(self.forward)), self.adapters.nbytes
        if held + needed > self._adapter_bytes:
            raise ModelError(
                f"the adapter takes {needed / 2**20:.1f} MiB of the GPU's memory and others have {held / 2**20:.1f} of "
                f"the {self._adapter_bytes / 2**20:.1f} that the KV pool leaves; name it in lora.NAME at the start, or "
                "take a lower kv.tokens, without kv.fit"
            )
        return packed(lora, decoder.kernels.device, decoder.dtype, needed, exact=decoder.exact)

    @property
    def stats(self) -> dict[str, int]:
        return self._drafting.stats | {"kv_saturated": self._passes.saturated}

    def forget(self) -> None:
        if self._under_way is not None and self._under_way.begun.made is not None:
            self._under_way.begun.made.reading.wait()  # till then the device may read what the next steps would write
        self._under_way, self._results = None, []
        self._residents.clear()
        self._settlement.clear()
        self._drafting.forget()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        return [*self.begin(plan, bind), *self.end()][-1]

    def begin(self, plan: StepPlan, bind: StepBind) -> list[StepResult]:
        with torch.inference_mode():
            if self._drafting.guesses or (self._under_way is not None and self._under_way.alone):
                self._catch_up()
            started = time.monotonic_ns()
            runs = self._residents.apply(plan, bind)
            if len(bind.copy_src):
                self._host.copy(list(zip(bind.copy_src.tolist(), bind.copy_dst.tolist(), strict=True)))
            drafts = self._drafting.drafts(bind, runs, self._residents)
            if self._drafting.guesses:
                drafts = [_fitting(draft) for draft in drafts]
            begun = self._frame.begin(runs, drafts)
            self._catch_up()
        if (unknown := self._passes.unknown(begun)) is not None:
            self._settlement.expect(runs, unknown)
        self._under_way = UnderWay(plan.step, started, begun, alone=unknown is None)
        return self._told()

    def end(self) -> list[StepResult]:
        with torch.inference_mode():
            self._catch_up()
        return self._told()

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    @property
    def there(self) -> bool:
        return self._under_way is not None and self._under_way.there

    def _catch_up(self) -> None:
        """End the step that is under way, if one is."""
        if (step := self._under_way) is None:
            return
        self._under_way = None
        took: list[Took] = []
        outcomes = self._frame.end(step.begun, took)
        started = max(step.started_ns, self._ended_ns)
        self._results.append(self._settlement.result(step.number, started, step.begun.runs, outcomes))
        self._ended_ns = self._results[-1].finished_ns
        self._drafting.took(took)

    def _told(self) -> list[StepResult]:
        told, self._results = self._results, []
        return told


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """A step that has begun. No other can begin before it has ended if it is `alone`."""

    number: int
    started_ns: int
    begun: Begun[Made]
    alone: bool

    @property
    def there(self) -> bool:
        return self.begun.made is None or self.begun.made.reading.there


def host(config: Config, facts: Facts, stacks: Stacks) -> Host:
    """What a drafter gets."""
    decoder = stacks.forward.decoder
    trees, device = decoder.trees, str(decoder.kernels.device)
    return Host(config, facts, stacks.target, stacks.open, trees=trees, claim=stacks.claim, taps=True, device=device)


def _widths(forward: Forward) -> dict[str, int]:
    """As `size_of` takes them."""
    products = forward.decoder.products if forward.together else []
    return {product.name: len(product.linear.weight) for product in products}


def _named_bytes(config: Config, spec: Spec, dtype: torch.dtype, forward: Forward) -> int:
    """That the adapters of the configuration take, each content once. Of one that cannot be read it is said when it is
    loaded."""
    sizes: dict[bytes, int] = {}
    for path in config.lora.values():
        with suppress(ModelError, OSError):
            lora = read(absolute(path), spec)
            sizes[lora.digest] = size_of(lora, dtype, _widths(forward))
    return sum(sizes.values())


def _fitting(draft: Draft) -> Draft:
    """As much of a tree as the kernels' masks hold, beside the sequence's last token."""
    if draft.parents is None or len(draft.tokens) < TREE:
        return draft
    chances = None if draft.chances is None else draft.chances[: TREE - 1]
    return Draft(draft.tokens[: TREE - 1], chances, draft.parents[: TREE - 1])


def worst_step(forward: Forward, config: Config) -> None:
    """Take the most memory that a step takes: a whole budget at the end of the longest context, beside as many decodes
    as there can be, all of which have an adapter, draw from penalised and masked distributions and want
    log-probabilities; and the same again while what came of the first is kept. With a drafter the second draws for all
    guesses that a step may have, or rejects them, from as many distributions as are there at a time; rows of logits are
    copied to lie in the order in which they are judged. Where latents of long chunks are expanded, chunks too short for
    that go before, for their queries in the space of latents. Everything lies in block 0, and yet nothing is taken to
    be shared."""
    decoder, spec = forward.decoder, forward.decoder.spec
    context, rows = config.model.context or spec.context, config.scheduler.max_sequences
    chunk = min(config.scheduler.chunk_budget, context)
    table = [0] * -(-context // decoder.block_size)
    short = [min(TREE, chunk - i) for i in range(0, chunk, TREE)]
    chunks = [[chunk]] if decoder.expansion is None else [short, [chunk]]
    steps = [[Span([0] * n, context - n, table) for n in [*each, *[1] * rows]] for each in chunks]
    sampling = Sampling(temperature=1.0, repetition=1.1, allowed=(0,), top_p=0.9)
    speaker = Speaker(decoder.kernels, spec.vocab_size, Matchers(), "coupled")
    under_way = []
    everyone = torch.arange(chunk + rows, device=decoder.kernels.device)
    guessed = rows + 1 if config.speculation.drafter is None else min(chunk + rows, rows * (1 + MAX_DRAFTS))
    for asked in (rows + 1, guessed):
        for spans in steps:
            decoder.adapting.now = [Adapted(widest(decoder.products), everyone)]  # of the next pass
            made = forward.run(build(spans, decoder.block_size), together=False)
        logits = forward.logits(made, list(range(chunk + rows - asked, chunk + rows)))
        drawn = Rows([Resident(0, [0], 1, 0, sampling)] * asked, np.ones(asked, np.int32), {}, {})
        if asked > rows + 1:
            n = min(asked - 1, CHANCES) if config.speculation.verification == "rejection" else 0
            drafts = [Draft([0] * n, np.zeros((n, spec.vocab_size))), *[Draft()] * (asked - n - 1)]
            speaker.spoken(drawn, logits, range(asked)[::-1], drafts, coupled=0 if n else asked)
        else:
            speaker.draw(drawn, logits)
        under_way.append((made, logits, logits.clone()))
