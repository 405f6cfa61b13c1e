"""The CPU executor: runs bound steps of a Llama-family model in fp32, each token independent of its company.

Exact mode: for a sequence, tokens are the same whatever else is in the step, however its prompt was cut into chunks
and blocks, and whether its KV was computed now, found in the cache or recomputed. `probe` makes sure of it at load.
"""

from __future__ import annotations

import time
from functools import partial
from operator import attrgetter
from typing import Any, Self

import msgspec
import torch

from octavo.core.config.schema import Config
from octavo.core.grammar import Grammars
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult
from octavo.core.models.locate import locate
from octavo.executors.adapters import Adapters
from octavo.executors.cpu.forward import Forward
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool, Llama, token_bytes
from octavo.executors.cpu.lora import Packed
from octavo.executors.cpu.passes import CpuPasses
from octavo.executors.cpu.probe import exact_adapter, load_exact
from octavo.executors.cpu.stacks import Stacks
from octavo.executors.drafting.contract import Host, Took
from octavo.executors.drafting.drafting import Drafting, settled
from octavo.executors.facts import PLAIN_KV, check_memory, kept_as, model_facts
from octavo.executors.frame import Frame
from octavo.executors.grammars import Matchers, grammars_of
from octavo.executors.loading.files import load_model
from octavo.executors.loading.peft import Lora, read
from octavo.executors.outcome import Settlement
from octavo.executors.residents import Residents
from octavo.executors.threads import default_threads

_MODE = b"exact fp32"


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
        self.adapters = self._adapters()
        self._settlement = Settlement(facts.vocab_size, self.adapters)
        self._drafting = drafting or Drafting(None, facts.vocab_size)
        passes = CpuPasses(forward, pool, Matchers(grammars), self._drafting)
        self._frame = Frame(passes, self._settlement, self._drafting)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises `ModelError` for a model that is not there, not of this family or too big, `NotExactError` when this
        machine cannot be exact."""
        config = settled(config)
        kept_as(config, PLAIN_KV, "cpu")
        torch.set_num_threads(config.executor.threads or default_threads())
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
                partial(read, spec=llama.spec),
                partial(exact_adapter, like=llama.arithmetic),
                self._residents.adapters,
                attrgetter("nbytes"),
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
            begun = self._frame.begin(runs, self._drafting.drafts(bind, runs, self._residents))
            outcomes = self._frame.end(begun, took)
            result = self._settlement.result(plan.step, started, runs, outcomes)
            self._drafting.took(took)
        return result
