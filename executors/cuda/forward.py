"""One pass of the model over a step's batch: as a recorded graph where there is one for it, else launch by launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from octavo.executors.adapters import Adapters
from octavo.executors.cuda.batch import Batch, attention_plans
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.graphs import Graphs, Recorder
from octavo.executors.cuda.lora import Adapted, Packed
from octavo.executors.cuda.mirror import mirrored, picked
from octavo.executors.loading.peft import Lora
from octavo.kernels.cuda.launch import Step


class Pass(NamedTuple):
    """Last hidden states [tokens, hidden], whether they are finite [tokens], and logits [tokens, vocabulary] where the
    pass had to compute them all. They are good until the next pass."""

    hidden: Tensor
    finite: Tensor
    logits: Tensor | None


class Forward:
    """`decoder` has its pool; without a `recorder` every step is launched."""

    def __init__(self, decoder: Decoder, recorder: Recorder | None = None) -> None:
        self.decoder = decoder
        self._fill = 0 if decoder.exact else decoder.kernels.blocks
        self.adapters: Adapters[Lora, Packed] | None = None
        """Set by whoever has some."""
        self._graphs = None if recorder is None else Graphs(decoder, recorder, self._fill)

    def run(self, batch: Batch, *, together: bool = True) -> Pass:
        """Write the KV of the batch's tokens, and what comes of them in the same order. `together` as in
        `attention_plans`."""
        decoder, spec = self.decoder, self.decoder.spec
        if self._graphs is not None and not batch.adapted and (kind := self._graphs.kind(batch)) is not None:
            return Pass(*self._graphs.run(kind, batch))
        device = decoder.kernels.device
        arrays: dict[str, npt.NDArray[Any]] = {
            "ids": batch.ids,
            "positions": batch.positions,
            "slots": batch.slots,
            "tables": batch.tables,
        }
        if batch.tree_mask is not None and batch.tree_start is not None:
            arrays |= {"tree_mask": batch.tree_mask, "tree_start": batch.tree_start}
        arrays |= {f"rows {i}": rows for i, (_, rows) in enumerate(batch.adapted)}
        at = mirrored(device, arrays)
        order = torch.arange(len(batch.ids), dtype=torch.int32, device=device)
        step = Step(at["positions"], at["slots"], order, at["tables"], at.get("tree_mask"), at.get("tree_start"))
        plans = {
            window: [
                decoder.kernels.stage(made, spec.kv_heads, decoder.mixed)
                for made in attention_plans(
                    batch,
                    decoder.group,
                    spec.kv_heads,
                    fill=self._fill,
                    window=window,
                    rows=decoder.rows,
                    together=together and spec.latent is None,
                )
            ]
            for window in decoder.windows
        }
        if self.adapters is not None:
            named = enumerate(adapter for adapter, _ in batch.adapted)
            decoder.adapting.now = [Adapted(self.adapters.of(adapter), at[f"rows {i}"]) for i, adapter in named]
        hidden = decoder.hidden(at["ids"], step, plans)
        decoder.adapting.now = ()
        return Pass(hidden, hidden.isfinite().all(dim=-1), None)

    def logits(self, made: Pass, rows: list[int]) -> Tensor:
        """Of these tokens of the pass, [n, vocabulary], fp32."""
        if made.logits is None:
            return self.decoder.logits(picked(made.hidden, rows))
        return picked(made.logits, rows)
