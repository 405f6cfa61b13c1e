"""Decode steps as recorded graphs: one launch by the host in place of hundreds.

A graph's arguments are frozen, so everything that differs between steps lies in buffers that stay: ids, positions,
slots, tables and lengths are written before a replay (by turns: a step may begin while the one before it runs), and the
attention's work is planned on the device. A graph is for a number of sequences, of columns in a block table, and of
works, each rounded up: the first step of a kind records it. Places that no sequence takes have no query, and a slot
below 0.

Nothing of this may take memory that nobody counted. So all graphs of a model have their inputs, their parts of
attention and what comes of them in the same rooms, which are there before the KV pool is sized; and what a pass takes
beside is a recorder's to keep: the largest kind is recorded before as well, and again over the pool, and smaller ones
fit in what it took. A graph itself lies on the device, too, and there may be hundreds of kinds: so many are kept, and
the one that was not used for longest goes.

Knows no CUDA: what records and replays is a `Recorder`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from octavo.executors.cuda.batch import SPLIT, Batch, alike, shared_plan
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.lora import Held, Owned
from octavo.executors.cuda.mirror import Mirror, Reading, Room, Shape, nbytes
from octavo.kernels.cuda.instances import DECODE_ROWS, PREFILL_ROWS
from octavo.kernels.cuda.launch import Staged, Step
from octavo.kernels.cuda.plan import ROUND, Plan

Replay: TypeAlias = Callable[[], None]
LARGEST, WORKS, COMMON, CELLS = 256, 2048, 512, 1 << 21
"""Sequences of the largest graph, works that its attention may need at least, those on what sequences share, and cells
of its block tables; above, launches are a small part of a step."""
KEPT = 64
"""Graphs of a model: of some megabytes each, which come out of what `memory` leaves unused."""


class Recorder(Protocol):
    def __call__(self, work: Callable[[], None]) -> Replay:
        """Record the launches of `work`, which was run before; a replay makes them again."""
        ...


class CudaRecorder:
    """Graphs of one GPU, with a pool of memory in common: they never run at once. What the pool took it keeps, for
    whatever is recorded later."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        torch.zeros(1, device="cuda")  # what it takes is loaded before
        # A pool that no graph refers to cannot be used again while something lies there, as cuBLAS' workspace does.
        self._first = self(partial(torch.zeros, 1, device="cuda"))

    def __call__(self, work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads, a driver's or a profiler's, may do as they like meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            work()
        return graph.replay


class Pass(NamedTuple):
    """Last hidden states [tokens, hidden], whether they are finite (int32 [tokens]), logits [tokens, vocabulary] where
    the pass had to compute them all, and the inputs of tapped layers side by side [tokens, taps · hidden], if there are
    some. They are good until the next pass."""

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
    rest: int = 0
    common: int = 0
    """Works of the host's plan, where sequences attend to what they share together: on the rest of each, and in common.
    """
    held: Held | None = None
    """Adapters that some of the sequences have."""


class _Said(NamedTuple):
    """What comes of a pass, as in `Pass`."""

    hidden: Tensor
    finite: Tensor
    logits: Tensor

    def first(self, n: int) -> _Said:
        return _Said(self.hidden[:n], self.finite[:n], self.logits[:n])


class _Rooms:
    """Memory for one graph at a time of a model, with so many sequences at most."""

    def __init__(self, decoder: Decoder, sequences: int, works: int, fill: int) -> None:
        spec, kernels, device = decoder.spec, decoder.kernels, decoder.kernels.device
        self.cells = min(CELLS, sequences * _power_of_two(-(-spec.context // decoder.block_size), 16))
        most = _inputs(sequences, 1, works, _common(decoder, sequences, fill))
        self.inputs = Room(device, nbytes(most) + nbytes({"": (np.int32, (self.cells,))}), turns=2)
        self.order = torch.arange(sequences, dtype=torch.int32, device=device)
        first, *others = decoder.windows
        self.works = works
        parts = kernels.room(works, works, works, rows_of(decoder, fill), spec.kv_heads, decoder.mixed)
        self.plans = {first: parts} | {window: parts.beside() for window in others}
        self.common = None
        if common := _common(decoder, sequences, fill):
            rows = decoder.rows[-1] if fill else DECODE_ROWS
            self.common = kernels.room(common, 0, common, rows, spec.kv_heads, decoder.mixed)
        self.said = _Said(
            torch.empty(sequences, spec.hidden, dtype=decoder.dtype, device=device),
            torch.empty(sequences, dtype=torch.int32, device=device),
            torch.empty(sequences, spec.vocab_size, dtype=torch.float32, device=device),
        )
        self._inner: dict[int, Tensor] = {}

    def inner(self, n: int, taps: int) -> Tensor:
        """Inputs of so many tapped layers, side by side."""
        if taps not in self._inner:
            sequences, hidden = self.said.hidden.shape
            self._inner[taps] = self.said.hidden.new_empty(sequences, taps * hidden)
        return self._inner[taps][:n]


class _Graph:
    """One kind's pass over the rooms, which leaves what comes of it in the first of `said`."""

    def __init__(self, decoder: Decoder, kind: Kind, fill: int, rooms: _Rooms) -> None:
        self._decoder, self._kind, self._fill = decoder, kind, fill
        n, device = kind.sequences, decoder.kernels.device
        self.mirror = Mirror(device, _inputs(n, kind.columns, kind.rest, kind.common), room=rooms.inputs)
        self._plans = {window: plan.first(kind.works) for window, plan in rooms.plans.items()}
        self._shared = self._of_host(rooms) if kind.common else None
        self._order, self._said = rooms.order[:n], rooms.said.first(n)
        self.inner = rooms.inner(n, len(kind.taps))

    def _of_host(self, rooms: _Rooms) -> Staged:
        at, kind, own, common = self.mirror.device, self._kind, rooms.plans[0], rooms.common
        assert common is not None  # as there are works
        parts = common.part_out[: kind.common], common.part_lse[: kind.common]
        first = Staged(
            at["common works"], common.merges, *parts, common.rows, counts=at["common counts"], order=at["order"]
        )
        mine = own.part_out[: kind.rest], own.part_lse[: kind.rest]
        return Staged(at["works"], at["merges"], *mine, own.rows, at["counts"], at["order"], first)

    def work(self) -> None:
        at, decoder = self.mirror.device, self._decoder
        plans = {window: [plan] for window, plan in self._plans.items()}
        for window, plan in self._plans.items():
            if not window and self._shared is not None:
                plans[window] = [self._shared]
                continue
            how = {"split": 0, "fill": self._fill} if self._fill else {"split": SPLIT, "step": ROUND}
            decoder.kernels.plan(plan, at["lengths"], at["firsts"], decoder.group, window=window, **how)
        step = Step(at["positions"], at["slots"], self._order, at["tables"])
        taps = dict.fromkeys(self._kind.taps, self.inner)
        if self._kind.held is not None:
            decoder.adapting.now = [Owned(self._kind.held, at["owners"])]
        hidden = decoder.hidden(at["ids"], step, plans, layers=self._kind.layers, taps=taps)
        decoder.adapting.now = ()
        if taps:
            torch.cat([taps[layer] for layer in self._kind.taps], dim=-1, out=self.inner)
        self._said.hidden.copy_(hidden)
        self._said.logits.copy_(decoder.logits(hidden))
        self._said.finite.copy_(hidden.isfinite().all(dim=-1))

    def fill(self, batch: Batch, shared: Plan | None) -> None:
        n, host = len(batch.ids), self.mirror.host
        host["ids"][:n], host["ids"][n:] = batch.ids, 0
        host["positions"][:n], host["positions"][n:] = batch.positions, 0
        host["slots"][:n], host["slots"][n:] = batch.slots, -1
        host["lengths"][:n], host["lengths"][n:] = batch.lengths, 0
        host["firsts"][: n + 1], host["firsts"][n + 1 :] = batch.firsts, batch.firsts[-1]
        if self._kind.held is not None:
            host["owners"][:] = -1
            for adapter, rows in batch.adapted:
                host["owners"][rows] = self._kind.held.places[adapter.digest]
        if shared is not None and shared.shared is not None and shared.order is not None:
            host["works"][: len(shared.works)] = shared.works
            host["merges"][: len(shared.merges)] = shared.merges
            host["counts"][:] = len(shared.works), len(shared.merges), shared.parts, 0
            host["order"][: len(shared.order)] = shared.order
            common = shared.shared
            host["common works"][: len(common.works)] = common.works
            host["common counts"][:] = len(common.works), 0, common.parts, 0
        host["tables"][:n, : batch.tables.shape[1]] = batch.tables
        self.mirror.send()


def _inputs(n: int, columns: int, rest: int, common: int) -> dict[str, Shape]:
    """Of a pass over so many sequences with block tables of so many columns, and works of the host's."""
    inputs: dict[str, Shape] = {
        "ids": (np.int64, (n,)),
        "slots": (np.int64, (n,)),
        "positions": (np.int32, (n,)),
        "lengths": (np.int32, (n,)),
        "firsts": (np.int32, (n + 1,)),
        "owners": (np.int32, (n,)),
    }
    if common:
        inputs |= {
            "works": (np.int32, (rest, 8)),
            "merges": (np.int32, (n, 8)),
            "counts": (np.int32, (4,)),
            "order": (np.int32, (2 * n,)),
            "common works": (np.int32, (common, 8)),
            "common counts": (np.int32, (4,)),
        }
    return inputs | {"tables": (np.int32, (n, columns))}


def _common(decoder: Decoder, sequences: int, fill: int) -> int:
    """Works that there may be on what sequences share; 0 where they do not attend together: to latents, within windows,
    or with more heads in a group than a work has rows."""
    if decoder.spec.latent is not None or 0 not in decoder.windows or decoder.group > DECODE_ROWS:
        return 0
    return max(fill // decoder.spec.kv_heads, sequences // 2) if fill else COMMON


class Graphs:
    """The graphs of a model, for up to `sequences` sequences (and `LARGEST`). `fill` as in `attention_plans`."""

    def __init__(self, decoder: Decoder, recorder: Recorder, fill: int, sequences: int) -> None:
        self._decoder, self._recorder, self._fill = decoder, recorder, fill
        self._recorded: dict[Kind, tuple[_Graph, Replay]] = {}
        """In the order of their last use."""
        self._firsts, self._alike = np.zeros(0, np.int32), False
        """First blocks of the last step's sequences, mostly those of the next, and whether any are the same."""
        self._sequences = min(LARGEST, _power_of_two(sequences, 1))
        self._tiles = -(-decoder.group // rows_of(decoder, fill))
        least = self._tiles * self._sequences
        works = max(fill // decoder.spec.kv_heads, least) if fill else max(WORKS, least)
        self._rooms = _Rooms(decoder, self._sequences, works, fill)

    def shared(self, batch: Batch) -> Plan | None:
        """The host's plan for a step of decodes that share a beginning, if it has room."""
        decoder, common = self._decoder, self._rooms.common
        if common is None or len(batch.ids) != len(batch.lengths) or len(batch.ids) > self._sequences:
            return None
        if not np.array_equal(firsts := batch.tables[:, 0], self._firsts):
            self._firsts, self._alike = firsts.copy(), alike(firsts)
        if not self._alike:
            return None
        made = shared_plan(batch, batch.queries(), decoder.group, decoder.spec.kv_heads, self._fill, decoder.rows)
        if made is None or made.shared is None:
            return None
        fits = len(made.works) <= self._rooms.works and len(made.shared.works) <= len(common.works)
        return made if fits else None

    def kind(
        self,
        batch: Batch,
        layers: int,
        taps: tuple[int, ...] = (),
        shared: Plan | None = None,
        held: Held | None = None,
    ) -> Kind | None:
        """None for a step that is not all decodes, or that there is no room for."""
        n = len(batch.lengths)
        if len(batch.ids) != n or n > self._sequences:
            return None
        sequences, columns = _power_of_two(n, 1), _power_of_two(batch.tables.shape[1], 16)
        planned = not self._fill and (shared is None or self._decoder.windows != [0])  # by the device, by lengths
        works = self._tiles * int((-(-batch.lengths // SPLIT)).sum()) if planned else 0
        kind = self._of(sequences, columns, works, layers, taps)._replace(held=held)
        if shared is not None and shared.shared is not None:
            rest = min(self._rooms.works, _power_of_two(len(shared.works), sequences))
            most = _common(self._decoder, self._sequences, self._fill)
            kind = kind._replace(rest=rest, common=min(most, _power_of_two(len(shared.shared.works), 16)))
        return kind if kind.works <= self._rooms.works and sequences * columns <= self._rooms.cells else None

    def largest(self, layers: int, taps: tuple[int, ...]) -> None:
        """Record the kind that takes the most memory, over no sequence at all."""
        nobody, ends = np.zeros(0, np.int32), np.zeros(1, np.int32)
        size = self._decoder.block_size
        batch = Batch(
            nobody.astype(np.int64), nobody, nobody.astype(np.int64), nobody.reshape(0, 0), nobody, ends, size
        )
        self.run(self._of(self._sequences, 16, 0, layers, taps), batch)
        Reading(self._rooms.said.finite).wait()  # what was sent is there: the first step may write its inputs

    def forget(self) -> None:
        """All that were recorded: the pool is another."""
        self._recorded.clear()

    def leave(self, held: Held) -> None:
        """Forget what was recorded with these adapters, which are not all that are held any more."""
        for kind in [kind for kind in self._recorded if kind.held is held]:
            del self._recorded[kind]

    def run(self, kind: Kind, batch: Batch, shared: Plan | None = None) -> Pass:
        """Of the batch's tokens."""
        if (found := self._recorded.pop(kind, None)) is None:
            graph = _Graph(self._decoder, kind, self._fill, self._rooms)
            graph.fill(batch, shared)
            graph.work()  # loads kernels, and is this step: what is recorded begins with the next of its kind
            if len(self._recorded) >= KEPT:
                del self._recorded[next(iter(self._recorded))]
            found = graph, self._recorder(graph.work)
        else:
            graph, replay = found
            graph.fill(batch, shared)
            replay()
        self._recorded[kind] = found  # the last
        n = len(batch.ids)
        return Pass(*self._rooms.said.first(n), graph.inner[:n] if kind.taps else None)

    def _of(self, sequences: int, columns: int, works: int, layers: int, taps: tuple[int, ...]) -> Kind:
        """With so many works, if how they are cut depends on lengths."""
        least = self._tiles * sequences
        if self._fill:
            return Kind(sequences, columns, max(self._fill // self._decoder.spec.kv_heads, least), layers, taps)
        return Kind(sequences, columns, _power_of_two(works, least), layers, taps)


def rows_of(decoder: Decoder, fill: int) -> int:
    """Packed rows in a work of decodes; the same kernel as `attention_plans` gives them."""
    few = not fill or decoder.group <= DECODE_ROWS or decoder.spec.latent is not None
    return DECODE_ROWS if few else PREFILL_ROWS


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
