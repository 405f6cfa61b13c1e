"""The CUDA executor: runs bound steps of a Llama-family model on one GPU, eagerly, over a paged KV pool.

What it runs on is a library of kernels: a GPU's, or in tests the emulator's. Everything else is the same code.
"""

from __future__ import annotations

import hashlib
import time
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.core.config.schema import Config
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.drawing import drawing
from octavo.executors.cuda.llama import Llama
from octavo.executors.loading.files import load_model
from octavo.executors.loading.spec import Model
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Resident, Residents, Run
from octavo.executors.sampling import logprob
from octavo.kernels.cuda.device import Device
from octavo.kernels.cuda.launch import Kernels
from octavo.kernels.cuda.pool import PoolLayout


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
        self._settlement = Settlement(self._residents, facts.vocab_size)

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
        self._settlement.clear()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self._residents.apply(plan, bind)
        with torch.inference_mode():
            self.llama.copy_blocks(list(zip(bind.copy_src.tolist(), bind.copy_dst.tolist(), strict=True)))
            outcomes = self._compute(runs)
        return self._settlement.result(plan.step, started, runs, outcomes)

    def _compute(self, runs: list[Run]) -> list[Outcome]:
        """Outcomes in the order of `runs`."""
        outcomes = self._settlement.refused(runs)
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
                outcomes[i] = Outcome(_not_finite(runs[i].start + rows.index(False)))
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

    def _sampled(self, run: Run, token: int, row: Tensor) -> Outcome:
        if token < 0:
            return Outcome(_not_finite(run.end - 1))
        wanted = run.resident.sampling.logprobs
        return Outcome(None, (token,), (logprob(row.cpu().numpy(), token, wanted) if wanted >= 0 else None,))


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
