"""One pass of the model over a step's batch: as a recorded graph where there is one for it, else launch by launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.executors.adapters import Adapters
from octavo.executors.cuda.batch import Batch, attention_plans
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.graphs import LARGEST, Graphs, Pass, Recorder
from octavo.executors.cuda.lora import APART, Adapted, Apart, Held, Packed, Together
from octavo.executors.cuda.mirror import picked
from octavo.executors.cuda.step import step_of
from octavo.executors.loading.peft import Lora


class Forward:
    """`decoder` has its pool; without a `recorder`, or if it cannot be recorded, every step is launched. Steps of more
    than `sequences` are, too."""

    def __init__(self, decoder: Decoder, recorder: Recorder | None = None, sequences: int = LARGEST) -> None:
        self.decoder, self.sequences = decoder, sequences
        self._fill = 0 if decoder.exact else decoder.kernels.blocks
        self.adapters: Adapters[Lora, Packed] | None = None
        """Set by whoever has some."""
        self.taps: Sequence[int] = ()
        """Layers whose inputs a pass over all of them tells; one may be there twice. Set by whoever wants to know."""
        self._held: Held | None = None
        self._graphs: Graphs | None = None
        if recorder is not None and decoder.recordable:
            self._graphs = Graphs(decoder, recorder, self._fill, sequences)

    def record(self) -> None:
        """Over the decoder's pool as it is now: the largest graph, in whose memory all others have room. They are
        recorded when they are needed."""
        self.forget()
        if self._graphs is not None:
            self._graphs.largest(self.decoder.spec.layers, tuple(self.taps))

    @property
    def together(self) -> bool:
        """Whether adapters lie side by side once more, for steps that are recorded."""
        return self._graphs is not None and not self.decoder.exact

    def separate(self) -> None:
        """Give that memory back, until a step asks for it again."""
        if self._graphs is not None and self._held is not None:
            self._graphs.leave(self._held)
        self._held = None

    def _with(self, batch: Batch) -> Held | None:
        """All adapters that are held, among them those of the batch; None if they are too many for a graph."""
        assert self.adapters is not None  # as somebody has one
        for adapter, _ in batch.adapted:
            self.adapters.of(adapter)
        held = self.adapters.held
        if self._held is None or self._held.places.keys() != held.keys():
            self.separate()
            if not self.decoder.exact:
                self._held = Together(held, self.decoder.products)
            elif len(held) <= APART:
                self._held = Apart(held)
        return self._held

    def forget(self) -> None:
        """What was recorded."""
        if self._graphs is not None:
            self._graphs.forget()

    def run(self, batch: Batch, *, together: bool = True, layers: int | None = None) -> Pass:
        """Write the KV of the batch's tokens, and what comes of them in the same order: of the first `layers`, or of
        all. `together` as in `attention_plans`."""
        decoder, spec = self.decoder, self.decoder.spec
        taps = tuple(self.taps) if layers is None else ()
        held = self._with(batch) if self._graphs is not None and batch.adapted else None
        if self._graphs is not None and (held is not None or not batch.adapted):
            shared = self._graphs.shared(batch) if together else None
            kind = self._graphs.kind(batch, layers or spec.layers, taps, shared, held)
            if kind is not None:
                return self._graphs.run(kind, batch, shared)
        owned = {f"rows {i}": rows for i, (_, rows) in enumerate(batch.adapted)}
        step, at = step_of(decoder.kernels.device, batch, {"ids": batch.ids, **owned})
        rest: Batch | None = batch
        if decoder.expansion is not None:
            decoder.expansion.now, rest = decoder.expansion.divide(batch, self._fill)
        plans = {
            window: [
                decoder.kernels.stage(made, spec.kv_heads, decoder.mixed)
                for made in attention_plans(
                    rest,
                    decoder.group,
                    spec.kv_heads,
                    fill=self._fill,
                    window=window,
                    rows=decoder.rows,
                    together=together and spec.latent is None,
                )
            ]
            if rest is not None
            else []
            for window in decoder.windows
        }
        if self.adapters is not None:
            named = enumerate(adapter for adapter, _ in batch.adapted)
            decoder.adapting.now = [Adapted(self.adapters.of(adapter), at[f"rows {i}"]) for i, adapter in named]
        tapped = dict.fromkeys(taps, at["ids"])
        hidden = decoder.hidden(at["ids"], step, plans, layers=layers, taps=tapped)
        decoder.adapting.now = ()
        if decoder.expansion is not None:
            decoder.expansion.now = None
        inner = torch.cat([tapped[layer] for layer in taps], dim=-1) if taps else None
        return Pass(hidden, hidden.isfinite().all(dim=-1).int(), None, inner)

    def logits(self, made: Pass, rows: Sequence[int]) -> Tensor:
        """Of these tokens of the pass, [n, vocabulary], fp32."""
        if made.logits is None:
            return self.decoder.logits(picked(made.hidden, rows))
        return picked(made.logits, rows)
