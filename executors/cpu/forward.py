"""What the CPU executor needs of a model: a forward pass over a paged pool, whichever model it is."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from octavo.executors.cpu.layout import PoolShape
from octavo.executors.cpu.llama import KvPool
from octavo.executors.loading.spec import Spec
from octavo.executors.residents import Span

L = TypeVar("L")
"""How it lays a step out."""


class Forward(Protocol[L]):
    @property
    def spec(self) -> Spec: ...

    def layout(self, spans: list[Span], shape: PoolShape) -> L: ...

    def hidden(self, layout: L, pool: KvPool, *, taps: dict[int, Tensor] | None = None) -> Tensor:
        """Write the KV of the step's tokens and give their last hidden states, [tokens, hidden]. Of the layers that are
        `taps`, the input goes there."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab]."""
        ...
