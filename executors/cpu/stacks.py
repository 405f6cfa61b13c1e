"""The models of the CPU executor as drafters see them: the target itself, and others over the same blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.messages import Facts
from octavo.core.models.locate import locate
from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool, Llama, token_bytes
from octavo.executors.facts import check_memory
from octavo.executors.loading.files import load_model
from octavo.executors.residents import Span
from octavo.executors.sampling import Logits


class CpuStack:
    """A `Stack` of the drafters' contract."""

    def __init__(self, llama: Llama, pool: KvPool) -> None:
        self._llama = llama
        self._pool = pool

    @property
    def vocab_size(self) -> int:
        return self._llama.spec.vocab_size

    @property
    def context(self) -> int:
        return self._llama.spec.context

    @property
    def layers(self) -> int:
        return self._llama.spec.layers

    @property
    def width(self) -> int:
        return self._llama.spec.hidden

    def after(self, spans: Sequence[Span], layers: int | None = None) -> Logits:
        ends = np.cumsum([len(span.ids) for span in spans]) - 1
        rows: Logits = self.logits(self.hidden(spans, layers)[ends.tolist()]).numpy()
        return rows

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self._llama.embed(torch.tensor(ids))

    def hidden(self, spans: Sequence[Span], layers: int | None = None) -> Tensor:
        return self._llama.hidden(self._llama.layout(list(spans), self._pool.shape), self._pool, layers)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._llama.logits(hidden)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._pool.copy_blocks(torch.tensor(source), torch.tensor(target))


class Stacks:
    """Makes them, and counts the memory that pools beside the target's take."""

    def __init__(self, llama: Llama, pool: KvPool, facts: Facts) -> None:
        self.target = CpuStack(llama, pool)
        self.block_bytes = 0
        """Of a block, in all pools but the target's."""
        self._arithmetic = llama.arithmetic
        self._facts = facts

    def claim(self, token_bytes: int) -> None:
        """For each token of the pool. Raises `ModelError`."""
        self.block_bytes += token_bytes * self._facts.block_size
        check_memory(self._facts, self._facts.block_bytes + self.block_bytes)

    def open(self, path: str) -> CpuStack:
        """Computes with the target's arithmetic: guesses need not be exact. Raises `ModelError`."""
        model, facts = load_model(locate(path)), self._facts
        spec = model.spec
        shape = PoolShape(facts.places, facts.block_size, spec.kv_heads, spec.head_dim)
        self.claim(token_bytes(spec))
        return CpuStack(Llama(model, self._arithmetic), KvPool(shape, spec.layers))
