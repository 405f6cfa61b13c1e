"""The models of the CUDA executor as drafters see them: the target itself, and others over the same blocks.

A model beside the target computes as it does: same mode, same kind of KV, graphs of its own. Its KV lies where the
target's lies, in a pool on the device with places in host memory behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.messages import Facts
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import Recorder
from octavo.executors.cuda.swap import HostPool
from octavo.executors.loading.files import in_fp32, open_checkpoint
from octavo.executors.residents import Span
from octavo.executors.sampling import Logits


class CudaStack:
    """A `Stack` of the drafters' contract."""

    def __init__(self, forward: Forward, host_blocks: int) -> None:
        """`forward.decoder` has its pool."""
        self._forward, self._decoder = forward, forward.decoder
        self._host = HostPool(self._decoder.kernels, self._decoder.pools, host_blocks)

    @property
    def vocab_size(self) -> int:
        return self._decoder.spec.vocab_size

    @property
    def context(self) -> int:
        return self._decoder.spec.context

    @property
    def layers(self) -> int:
        return self._decoder.spec.layers

    @property
    def width(self) -> int:
        return self._decoder.spec.hidden

    def after(self, spans: Sequence[Span], layers: int | None = None) -> Logits:
        passed = self._forward.run(build(list(spans), self._decoder.block_size), layers=layers)
        ends = np.cumsum([len(span.ids) for span in spans]) - 1
        rows: Logits = self._forward.logits(passed, ends.tolist()).cpu().numpy()
        return rows

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self._decoder.embedded(torch.tensor(ids, device=self._decoder.kernels.device)).float()

    def hidden(self, spans: Sequence[Span], layers: int | None = None) -> Tensor:
        passed = self._forward.run(build(list(spans), self._decoder.block_size), layers=layers)
        return passed.hidden.to(torch.float32, copy=True)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden.to(self._decoder.dtype))

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._host.copy(list(zip(source, target, strict=True)))


class Stacks:
    """Makes them, and counts the memory that others take beside the target. Drafters are made twice: over a pool of
    no size to speak of, so that what they take is known when the pool's is chosen, and over the pool."""

    def __init__(self, forward: Forward, facts: Facts, kv: torch.dtype, recorder: Recorder | None = None) -> None:
        self.forward, self._facts, self._kv, self._recorder = forward, facts, kv, recorder
        self._opened: dict[str, Forward] = {}
        self.pool_bytes = 0
        """Of a block in other models' pools."""
        self.own_bytes = 0
        """Of a block, or of a block's place in host memory: what drafters keep of their own, on the device for both."""
        self.target = CudaStack(forward, 0)

    def over(self, facts: Facts) -> Stacks:
        """The same models over a pool of this size; the target has it already."""
        made = Stacks(self.forward, facts, self._kv, self._recorder)
        made._opened = self._opened
        return made

    def open(self, path: str) -> CudaStack:
        """Raises `ModelError`."""
        if (forward := self._opened.get(path)) is None:
            forward = self._opened[path] = self._loaded(path)
        decoder = forward.decoder
        self.pool_bytes += decoder.spec.layers * decoder.layout(1).block_bytes
        decoder.allocate(self._facts.total_blocks)
        return CudaStack(forward, self._facts.host_blocks)

    def claim(self, token_bytes: int) -> None:
        """For each token of the pool. Whether there is room is seen when the pool's size is chosen."""
        self.own_bytes += token_bytes * self._facts.block_size

    def _loaded(self, path: str) -> Forward:
        files, target = locate(path), self.forward.decoder
        checkpoint = open_checkpoint(files)
        if beyond := checkpoint.spec.beyond_cuda():
            raise ModelError(f"the draft model {files.model_id} has {beyond}, which this executor does not")
        try:
            decoder = Decoder(
                in_fp32(checkpoint), target.kernels, target.dtype, target.block_size, exact=target.exact, kv=self._kv,
                context=self._facts.context,
            )  # fmt: skip
            decoder.layout(1)
        except ValueError as error:
            raise ModelError(f"{files.model_id} cannot run on CUDA kernels: {error}") from error
        return Forward(decoder, self._recorder, self.forward.sequences)
