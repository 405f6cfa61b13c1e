"""Decode steps as recorded graphs: one launch by the host in place of hundreds.

A graph's arguments are frozen, so everything that differs between steps lies in buffers that stay: ids, positions,
slots, tables and lengths are written before a replay (by turns: a step may begin while the one before it runs), and the
attention's work is planned on the device. A graph is for
a number of sequences, of columns in a block table, and of works, each rounded up: the first step of a kind records it.
Places that no sequence takes have no query, and a slot below 0. What comes of a pass lies in the same buffers for all
graphs of a model: logits of each kind's own would take more of the device than anybody counted.

Knows no CUDA: what records and replays is a `Recorder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from octavo.executors.cuda.batch import SPLIT, Batch
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.mirror import Mirror
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS
from octavo.kernels.cuda.launch import Staged, Step

Replay: TypeAlias = Callable[[], None]
LARGEST = 256
"""Sequences of the largest graph; above, launches are a small part of a step."""


class Recorder(Protocol):
    def __call__(self, work: Callable[[], None]) -> Replay:
        """Record the launches of `work`, which was run before; a replay makes them again."""
        ...


class CudaRecorder:
    """Graphs of one GPU, with a pool of memory in common: they never run at once."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            work()
        return graph.replay


class Pass(NamedTuple):
    """Last hidden states [tokens, hidden], whether they are finite [tokens], logits [tokens, vocabulary] where the pass
    had to compute them all, and the inputs of tapped layers side by side [tokens, taps · hidden], if there are some.
    They are good until the next pass."""

    hidden: Tensor
    finite: Tensor
    logits: Tensor | None
    inner: Tensor | None


class Kind(NamedTuple):
    """What a graph has room for."""

    sequences: int
    columns: int
    works: int
    layers: int
    """That are computed, as if they were all."""
    taps: tuple[int, ...]
    """Layers whose inputs are told."""


class _Said(NamedTuple):
    """What comes of a pass, as in `Pass`."""

    hidden: Tensor
    finite: Tensor
    logits: Tensor

    def first(self, n: int) -> _Said:
        return _Said(self.hidden[:n], self.finite[:n], self.logits[:n])


class _Graph:
    """One kind's buffers, and the pass over them, which leaves what comes of it in the first of `said`."""

    def __init__(self, decoder: Decoder, kind: Kind, fill: int, said: _Said) -> None:
        self._decoder, self._kind, self._fill = decoder, kind, fill
        n, device = kind.sequences, decoder.kernels.device
        self.mirror = Mirror(
            device,
            {
                "ids": (np.int64, (n,)),
                "slots": (np.int64, (n,)),
                "positions": (np.int32, (n,)),
                "lengths": (np.int32, (n,)),
                "firsts": (np.int32, (n + 1,)),
                "tables": (np.int32, (n, kind.columns)),
            },
            turns=2,
        )
        spec = decoder.spec
        rows = rows_of(decoder, fill)
        works = kind.works
        self._plans: dict[int, Staged] = {
            window: decoder.kernels.room(works, works, works, rows, spec.kv_heads, decoder.mixed)
            for window in decoder.windows
        }
        self._order = torch.arange(n, dtype=torch.int32, device=device)
        self._said = said.first(n)
        self.inner = torch.empty(n, len(kind.taps) * spec.hidden, dtype=decoder.dtype, device=device)

    def work(self) -> None:
        at, decoder = self.mirror.device, self._decoder
        split = 0 if self._fill else SPLIT
        for window, plan in self._plans.items():
            decoder.kernels.plan(
                plan, at["lengths"], at["firsts"], decoder.group, split=split, fill=self._fill, window=window
            )
        step = Step(at["positions"], at["slots"], self._order, at["tables"])
        plans = {window: [plan] for window, plan in self._plans.items()}
        taps = dict.fromkeys(self._kind.taps, self.inner)
        hidden = decoder.hidden(at["ids"], step, plans, layers=self._kind.layers, taps=taps)
        if taps:
            torch.cat([taps[layer] for layer in self._kind.taps], dim=-1, out=self.inner)
        self._said.hidden.copy_(hidden)
        self._said.logits.copy_(decoder.logits(hidden))
        self._said.finite.copy_(hidden.isfinite().all(dim=-1))

    def fill(self, batch: Batch) -> None:
        n, host = len(batch.ids), self.mirror.host
        host["ids"][:n], host["positions"][:n] = batch.ids, batch.positions
        host["slots"][:n], host["slots"][n:] = batch.slots, -1
        host["lengths"][:n], host["lengths"][n:] = batch.lengths, 0
        host["firsts"][: n + 1], host["firsts"][n + 1 :] = batch.firsts, batch.firsts[-1]
        host["tables"][:n, : batch.tables.shape[1]] = batch.tables
        self.mirror.send()


class Graphs:
    """The graphs of a model. `fill` as in `attention_plans`."""

    def __init__(self, decoder: Decoder, recorder: Recorder, fill: int) -> None:
        self._decoder, self._recorder, self._fill = decoder, recorder, fill
        self._recorded: dict[Kind, tuple[_Graph, Replay]] = {}
        spec, device = decoder.spec, decoder.kernels.device
        self._said = _Said(
            torch.empty(LARGEST, spec.hidden, dtype=decoder.dtype, device=device),
            torch.empty(LARGEST, dtype=torch.bool, device=device),
            torch.empty(LARGEST, spec.vocab_size, dtype=torch.float32, device=device),
        )

    def kind(self, batch: Batch, layers: int, taps: tuple[int, ...] = ()) -> Kind | None:
        """None for a step that is not all decodes, or of too many sequences."""
        n = len(batch.lengths)
        if len(batch.ids) != n or n > LARGEST:
            return None
        sequences, columns = _power_of_two(n, 1), _power_of_two(batch.tables.shape[1], 16)
        tiles = -(-self._decoder.group // rows_of(self._decoder, self._fill))
        if self._fill:
            works = max(self._fill // self._decoder.spec.kv_heads, tiles * sequences)
        else:
            works = _power_of_two(tiles * int((-(-batch.lengths // SPLIT)).sum()), sequences)
        return Kind(sequences, columns, works, layers, taps)

    def run(self, kind: Kind, batch: Batch) -> Pass:
        """Of the batch's tokens."""
        if (found := self._recorded.get(kind)) is None:
            graph = _Graph(self._decoder, kind, self._fill, self._said)
            graph.fill(batch)
            graph.work()  # loads kernels, and is this step: what is recorded begins with the next of its kind
            self._recorded[kind] = graph, self._recorder(graph.work)
        else:
            graph, replay = found
            graph.fill(batch)
            replay()
        n = len(batch.ids)
        return Pass(*self._said.first(n), graph.inner[:n] if kind.taps else None)


def rows_of(decoder: Decoder, fill: int) -> int:
    """Packed rows in a work of decodes; the same kernel as `attention_plans` gives them."""
    few = not fill or decoder.group <= DECODE_ROWS or decoder.spec.latent is not None
    return DECODE_ROWS if few else PREFILL_ROWS


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
