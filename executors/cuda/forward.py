"""One pass of the model over a step's spans: as a recorded graph where there is one for it, else launch by launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.executors.cuda.batch import attention_plans, build
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.graphs import Graphs, Recorder
from octavo.executors.cuda.mirror import mirrored
from octavo.executors.residents import Span
from octavo.kernels.cuda.launch import Step


class Pass(NamedTuple):
    """Last hidden states [tokens, hidden], and logits [tokens, vocabulary] where the pass had to compute them all.
    Both are good until the next pass."""

    hidden: Tensor
    logits: Tensor | None


class Forward:
    """`decoder` has its pool; without a `recorder` every step is launched."""

    def __init__(self, decoder: Decoder, recorder: Recorder | None = None) -> None:
        self.decoder = decoder
        self._fill = 0 if decoder.exact else decoder.kernels.blocks
        self._graphs = None if recorder is None else Graphs(decoder, recorder, self._fill)

    def run(self, spans: list[Span]) -> Pass:
        """Write the KV of the spans' tokens, and what comes of them in the same order."""
        decoder, spec = self.decoder, self.decoder.spec
        batch = build(spans, decoder.block_size)
        if self._graphs is not None and (kind := self._graphs.kind(batch)) is not None:
            return Pass(*self._graphs.run(kind, batch))
        device = decoder.kernels.device
        at = mirrored(
            device,
            {"ids": batch.ids, "positions": batch.positions, "slots": batch.slots, "tables": batch.tables},
        )
        order = torch.arange(len(batch.ids), dtype=torch.int32, device=device)
        step = Step(at["positions"], at["slots"], order, at["tables"])
        plans = {
            window: [
                decoder.kernels.stage(made, spec.kv_heads, spec.head_dim)
                for made in attention_plans(batch, decoder.group, spec.kv_heads, fill=self._fill, window=window)
            ]
            for window in decoder.windows
        }
        return Pass(decoder.hidden(at["ids"], step, plans), None)

    def logits(self, made: Pass, rows: list[int]) -> Tensor:
        """Of these tokens of the pass, [n, vocabulary], fp32."""
        if made.logits is None:
            return self.decoder.logits(made.hidden[rows])
        return made.logits if rows == list(range(len(made.logits))) else made.logits[rows]
