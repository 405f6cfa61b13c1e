"""The models of the native executor as drafters see them: the target itself, and others over the same blocks.

What they give as tensors needs torch, which is loaded only for drafters that ask for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from octavo.core.messages import Facts
from octavo.core.models.locate import locate
from octavo.executors.drafting.contract import Took
from octavo.executors.facts import check_memory
from octavo.executors.loading.files import open_checkpoint
from octavo.executors.native.batch import of_spans
from octavo.executors.native.ledger import weights_bytes
from octavo.executors.native.library import Floats, int32s
from octavo.executors.native.matrix import LANES, Wanted
from octavo.executors.native.program import Native, Pool, kv_bytes
from octavo.executors.native.weights import Weights
from octavo.executors.residents import Run, Span

if TYPE_CHECKING:
    from torch import Tensor


class NativeStack:
    """A `Stack` of the drafters' contract."""

    def __init__(self, model: Native) -> None:
        self._model = model
        self._weights = model.weights
        self._spec = model.weights.spec

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def context(self) -> int:
        return self._weights.context

    @property
    def layers(self) -> int:
        return self._spec.layers

    @property
    def width(self) -> int:
        return self._spec.hidden

    def after(self, spans: Sequence[Span], layers: int | None = None) -> Floats:
        return self._model.step(of_spans(spans), layers=layers).logits

    def embed(self, ids: Sequence[int]) -> Tensor:
        out = np.empty((len(ids), self._spec.hidden), np.float32)
        wanted, matrix = int32s(ids), self._weights.matrices["embed"]
        if self._weights.library.oct_embed(
            self._model.isa, matrix, wanted.ctypes.data, len(wanted), self._spec.embed_scale, out.ctypes.data
        ):
            raise IndexError(f"ids from {wanted.min()} to {wanted.max()}, of {self._spec.vocab_size} tokens")
        return _tensor(out)

    def hidden(self, spans: Sequence[Span], layers: int | None = None) -> Tensor:
        states = self._model.step(of_spans(spans, samples=False), layers=layers, hidden=True).hidden
        assert states is not None  # asked for
        return _tensor(states)

    def logits(self, hidden: Tensor) -> Tensor:
        spec, matrix = self._spec, self._weights.matrices[self._weights.head]
        rows: Floats = np.ascontiguousarray(hidden.numpy(), dtype=np.float32)
        out = np.empty((len(rows), LANES * matrix.blocks), np.float32)
        self._weights.library.oct_linear(
            self._model.isa, matrix, rows.ctypes.data, len(rows), self._weights.exact, out.ctypes.data
        )
        if (bias := self._weights.vectors.get(f"{self._weights.head}.bias")) is not None:
            out += bias
        if spec.logit_cap:
            out = spec.logit_cap * np.tanh(out / spec.logit_cap)
        return _tensor(out[:, : spec.vocab_size])

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._model.copy_blocks(int32s(source), int32s(target))


class Stacks:
    """Makes them, and counts the memory that others take beside the target."""

    def __init__(self, model: Native, facts: Facts, wanted: Wanted) -> None:
        self.target = NativeStack(model)
        self._model = model
        self._facts = facts
        self._wanted = wanted
        self._block_bytes = 0
        self._weights_bytes = 0

    def open(self, path: str) -> NativeStack:
        """Computes as the target does: same mode, same kind of KV. Raises `ModelError`."""
        checkpoint, facts, pool = open_checkpoint(locate(path)), self._facts, self._model.pool
        self.claim(kv_bytes(checkpoint.spec, pool.kind))
        weights = Weights(
            self._model.weights.library, checkpoint, exact=self._model.weights.exact, wanted=self._wanted,
            context=facts.context,
        )  # fmt: skip
        self._weights_bytes += weights_bytes(weights)
        return NativeStack(
            Native(weights, Pool(pool.blocks, pool.block_size, pool.kind), self._model.threads, self._model.isa)
        )

    def claim(self, token_bytes: int) -> None:
        """For each token of the pool. Raises `ModelError`."""
        self._block_bytes += token_bytes * self._facts.block_size
        check_memory(self._facts, self._facts.block_bytes + self._block_bytes)

    def counted(self, facts: Facts) -> Facts:
        """With what the others take."""
        return msgspec.structs.replace(
            facts,
            block_bytes=facts.block_bytes + self._block_bytes,
            weights_bytes=facts.weights_bytes + self._weights_bytes,
        )


def taken(computed: Sequence[tuple[Run, list[int]]], hidden: Floats, inner: Floats | None) -> list[Took]:
    """Of runs, of which the given rows of `hidden` and `inner` stay."""
    return [
        Took(run.resident, run.start, _tensor(hidden[rows]), None if inner is None else _tensor(inner[rows]))
        for run, rows in computed
    ]


def _tensor(array: Floats) -> Tensor:
    import torch

    return torch.from_numpy(array)
