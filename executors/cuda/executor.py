"""The CUDA executor: runs bound steps of a Llama-family model on one GPU, eagerly, over a paged KV pool.

What it runs on is a library of kernels: a GPU's, or in tests the emulator's. Everything else is the same code.
"""

from __future__ import annotations

import hashlib
import time
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.core.config.schema import Config
from octavo.core.messages import Facts, Failed, StepBind, StepPlan, StepResult, TokenLogprob, col
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.drawing import drawing
from octavo.executors.cuda.llama import Llama
from octavo.executors.loading.files import load_model
from octavo.executors.loading.spec import Model
from octavo.executors.residents import Resident, Residents, Run
from octavo.executors.sampling import logprob
from octavo.kernels.cuda.device import Device
from octavo.kernels.cuda.launch import Kernels
from octavo.kernels.cuda.pool import PoolLayout


class _Outcome(NamedTuple):
    """What came of a run: a reason why it failed, or its new token if it samples."""

    failure: str | None = None
    token: int | None = None
    logprob: TokenLogprob | None = None


class CudaExecutor:
    """Entry point `cuda` of `octavo.executor`."""

    def __init__(self, model: Model, kernels: Kernels, facts: Facts, dtype: torch.dtype) -> None:
        spec = model.spec
        layout = PoolLayout(facts.total_blocks, facts.block_size, spec.kv_heads, spec.head_dim, dtype)
        self.facts = facts
        with torch.inference_mode():
            self.llama = Llama(model, kernels, layout, dtype)
        self._kernels = kernels
        self._residents = Residents()
        self._failed: dict[int, str] = {}
        """By open_id, why a residency can no longer be computed; the steps already planned for it fail as well."""

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `DeviceError` or `NvrtcError` without a GPU to run on, `ModelError` when the model does not fit."""
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        kernels = Kernels(Device(device), device)
        files = locate(config.model.path)
        model = load_model(files)
        facts = facts_for(config, files.model_id, model, torch.bfloat16)
        free, _ = torch.cuda.mem_get_info(device)
        weights = 2 * sum(weight.numel() for weight in model.weights.values())
        if (needed := weights + facts.total_blocks * facts.block_bytes) > free:
            raise ModelError(
                f"weights of {weights / 2**30:.1f} GiB and a pool of kv.tokens = {config.kv.tokens} take "
                f"{needed / 2**30:.1f} GiB, the GPU has {free / 2**30:.1f} GiB free; lower kv.tokens"
            )
        return cls(model, kernels, facts, torch.bfloat16)

    def forget(self) -> None:
        self._residents.clear()
        self._failed.clear()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self._residents.apply(plan, bind)
        live = {resident.open_id for resident in self._residents.slots.values()}
        self._failed = {open_id: reason for open_id, reason in self._failed.items() if open_id in live}
        with torch.inference_mode():
            self.llama.copy_blocks(list(zip(bind.copy_src.tolist(), bind.copy_dst.tolist(), strict=True)))
            outcomes = self._compute(runs)
        for run, outcome in zip(runs, outcomes, strict=True):
            self._settle(run, outcome)
        done = [(run, outcome) for run, outcome in zip(runs, outcomes, strict=True) if outcome.failure is None]
        wanted = any(run.resident.sampling.logprobs >= 0 for run, _ in done)
        return StepResult(
            step=plan.step,
            slot=col([run.slot for run, _ in done]),
            open_id=col([run.resident.open_id for run, _ in done]),
            n_new=col([int(outcome.token is not None) for _, outcome in done]),
            tokens=col([outcome.token for _, outcome in done if outcome.token is not None]),
            kv_len=col([run.resident.kv_len for run, _ in done]),
            started_ns=started,
            finished_ns=time.monotonic_ns(),
            failed=[
                Failed(run.slot, run.resident.open_id, outcome.failure)
                for run, outcome in zip(runs, outcomes, strict=True)
                if outcome.failure is not None
            ],
            logprobs=[outcome.logprob for _, outcome in done if outcome.token is not None] if wanted else None,
        )

    def _compute(self, runs: list[Run]) -> list[_Outcome]:
        """Outcomes in the order of `runs`."""
        outcomes = [_Outcome(self._refusal(run)) for run in runs]
        sound = [i for i, outcome in enumerate(outcomes) if outcome.failure is None]
        if not sound:
            return outcomes
        batch = build([runs[i] for i in sound], self.facts.block_size, self.llama.group)
        hidden = self.llama.hidden(batch)
        sampled = [(i, end - 1) for i, end in zip(sound, batch.ends, strict=True) if runs[i].samples]
        logits = self.llama.logits(hidden[[row for _, row in sampled]])
        tokens = self._draw([runs[i].resident for i, _ in sampled], logits).tolist()
        finite = hidden.isfinite().all(dim=-1).tolist()  # read last: the host waits for the device only here
        for i, end in zip(sound, batch.ends, strict=True):
            rows = finite[end - (runs[i].end - runs[i].start) : end]
            if not all(rows):
                outcomes[i] = _Outcome(_not_finite(runs[i].start + rows.index(False)))
        for (i, _), token, row in zip(sampled, tokens, logits, strict=True):
            if outcomes[i].failure is None:
                outcomes[i] = self._sampled(runs[i], token, row)
        return outcomes

    def _draw(self, residents: list[Resident], logits: Tensor) -> Tensor:
        """A token for each, -1 where logits are not finite."""
        made = drawing(residents, self.facts.vocab_size)

        def device(array: npt.NDArray[np.generic] | None) -> Tensor | None:
            return None if array is None or not array.size else torch.from_numpy(array).to(logits.device)

        ids, values = device(made.bias_ids), device(made.bias_values)
        bias = None if ids is None or values is None else (ids, values)
        return self._kernels.sample(
            logits, made.draws, counts=device(made.counts), allowed=device(made.allowed), bias=bias
        )

    def _sampled(self, run: Run, token: int, row: Tensor) -> _Outcome:
        if token < 0:
            return _Outcome(_not_finite(run.end - 1))
        wanted = run.resident.sampling.logprobs
        return _Outcome(None, token, logprob(row.cpu().numpy(), token, wanted) if wanted >= 0 else None)

    def _refusal(self, run: Run) -> str | None:
        """Why a run cannot be computed at all."""
        if (reason := self._failed.get(run.resident.open_id)) is not None:
            return reason
        ids = run.resident.tokens[run.start : run.end]
        if min(ids) < 0 or max(ids) >= self.facts.vocab_size:
            return f"a token id is outside of the model's vocabulary [0, {self.facts.vocab_size})"
        return None

    def _settle(self, run: Run, outcome: _Outcome) -> None:
        """Bring the resident to where the plan's author takes it to be, also when it failed: its next step may be
        on the way already."""
        run.resident.kv_len = run.end
        if outcome.failure is not None:
            self._failed[run.resident.open_id] = outcome.failure
            run.resident.tokens += [0] * run.samples
        elif outcome.token is not None:
            run.resident.tokens.append(outcome.token)


def facts_for(config: Config, model_id: str, model: Model, dtype: torch.dtype) -> Facts:
    """Raises `ModelError` when the configuration does not suit the model or the kernels."""
    spec, size = model.spec, config.kv.block_size
    context = config.model.context or spec.context
    if context > spec.context:
        raise ModelError(f"model.context is {context}, but {model_id} was made for {spec.context} tokens")
    if (blocks := config.kv.tokens // size) < 1:
        raise ModelError(f"kv.tokens = {config.kv.tokens} holds no block of kv.block_size = {size} tokens")
    if spec.hidden % 8 or spec.inner % 8:
        raise ModelError(f"kernels need widths that are multiples of 8; {model_id} has {spec.hidden} and {spec.inner}")
    try:
        layout = PoolLayout(blocks, size, spec.kv_heads, spec.head_dim, dtype)
    except ValueError as error:
        raise ModelError(f"{model_id} cannot run on CUDA kernels: {error}") from error
    return Facts(
        model_id=config.model.name or model_id,
        context=context,
        vocab_size=spec.vocab_size,
        block_size=size,
        total_blocks=blocks,
        block_bytes=spec.layers * layout.block_bytes,
        cache_seed=hashlib.sha256(model.digest + f"cuda {dtype}".encode()).digest()[:16],
        serves=("restrictions",),
    )


def _not_finite(position: int) -> str:
    return f"the model's numbers at position {position} are not finite"
