"""One pass of the model over a step's spans: as a recorded graph where there is one for it, else launch by launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.executors.cuda.batch import attention_plans, build
from octavo.executors.cuda.graphs import Graphs, Recorder
from octavo.executors.cuda.llama import Llama
from octavo.executors.cuda.mirror import mirrored
from octavo.executors.residents import Span
from octavo.kernels.cuda.launch import Step


class Pass(NamedTuple):
    """Last hidden states [tokens, hidden], and logits [tokens, vocabulary] where the pass had to compute them all.
    Both are good until the next pass."""

    hidden: Tensor
    logits: Tensor | None


class Forward:
    """`llama` has its pool; without a `recorder` every step is launched."""

    def __init__(self, llama: Llama, recorder: Recorder | None = None) -> None:
        self.llama = llama
        self._fill = 0 if llama.exact else llama.kernels.blocks
        self._graphs = None if recorder is None else Graphs(llama, recorder, self._fill)

    def run(self, spans: list[Span]) -> Pass:
        """Write the KV of the spans' tokens, and what comes of them in the same order."""
        llama, spec = self.llama, self.llama.spec
        batch = build(spans, llama.block_size)
        if self._graphs is not None and (kind := self._graphs.kind(batch)) is not None:
            return Pass(*self._graphs.run(kind, batch))
        device = llama.kernels.device
        at = mirrored(
            device,
            {"ids": batch.ids, "positions": batch.positions, "slots": batch.slots, "tables": batch.tables},
        )
        order = torch.arange(len(batch.ids), dtype=torch.int32, device=device)
        step = Step(at["positions"], at["slots"], order, at["tables"])
        plans = [
            llama.kernels.stage(made, spec.kv_heads, spec.head_dim)
            for made in attention_plans(batch, llama.group, spec.kv_heads, fill=self._fill)
        ]
        return Pass(llama.hidden(at["ids"], step, plans), None)

    def logits(self, made: Pass, rows: list[int]) -> Tensor:
        """Of these tokens of the pass, [n, vocabulary], fp32."""
        if made.logits is None:
            return self.llama.logits(made.hidden[rows])
        return made.logits if rows == list(range(len(made.logits))) else made.logits[rows]
