"""Host memory behind the pool: evicted blocks go there and come back by a bind's copies (see `core.kv.host`).

A block's bytes of all layers lie together there, so that one transfer moves it. Transfers run aside of the steps: a
block that leaves is read into a staging buffer in the order of the steps and goes on from there while the next one
computes; one that comes back is on its way while the step before still computes, and only the step that needs it waits.
Staging buffers have a fixed size, so many blocks go in rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from octavo.kernels.cuda.launch import Kernels

STAGED = 16 * 2**20
"""Bytes of each of two staging buffers, if a block takes no more."""
PINNED = 2**30
"""Bytes of host memory that are pinned at once, at most: torch rounds them up to a power of two."""
Pair: TypeAlias = tuple[int, int]
"""Source and target: blocks of the pool, or places in host memory, whose numbers follow those."""


class Mark(Protocol):
    """As much as was launched before it was made."""


class Aside(Protocol):
    """A second order of work on a device, beside that of the steps."""

    def of_steps(self) -> Mark: ...

    def of_transfers(self) -> Mark: ...

    def hold_steps(self, mark: Mark) -> None:
        """What steps launch from now on waits for it."""
        ...

    def hold_transfers(self, mark: Mark) -> None: ...

    def transfer(self, target: Tensor, source: Tensor) -> None: ...


class SideStream:
    """Transfers on a stream of their own beside torch's current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def of_steps(self) -> Mark:
        mark: torch.cuda.Event = torch.cuda.current_stream(self._stream.device).record_event()
        return mark

    def of_transfers(self) -> Mark:
        mark: torch.cuda.Event = self._stream.record_event()
        return mark

    def hold_steps(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def hold_transfers(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)

    def transfer(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)


class InOrder:
    """Where nothing runs aside, as on a CPU."""

    def of_steps(self) -> Mark:
        return self

    def of_transfers(self) -> Mark:
        return self

    def hold_steps(self, mark: Mark) -> None: ...

    def hold_transfers(self, mark: Mark) -> None: ...

    def transfer(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class _Staging:
    """A buffer, and what must be over before it is used again: by steps what left it, by transfers what was read."""

    def __init__(self, buffer: Tensor, aside: Aside) -> None:
        self.buffer = buffer
        self.left, self.read = aside.of_transfers(), aside.of_steps()


class HostPool:
    """`places` blocks, whose ids follow those of the pool. `pools` are the layers' [blocks, block_bytes]."""

    def __init__(self, kernels: Kernels, pools: list[Tensor], places: int, aside: Aside | None = None) -> None:
        self._kernels = kernels
        self._pools = pools
        self._blocks, block_bytes = pools[0].shape
        pinned = kernels.device.type == "cuda"
        self._piece = max(1, PINNED // (len(pools) * block_bytes))
        self._host = [
            torch.zeros(min(self._piece, places - at), len(pools), block_bytes, dtype=torch.uint8, pin_memory=pinned)
            for at in range(0, places, self._piece)
        ]
        self._aside = aside or (SideStream(kernels.device) if pinned and places else InOrder())
        self._most = _at_once(len(pools) * block_bytes)
        each = min(self._most, 2 * places)
        self._staged = [_Staging(kernels.staging(pools, each), self._aside) for _ in range(2)] if places else []

    def copy(self, pairs: list[Pair]) -> None:
        """As if all were read before any is written; a pair has a block on one side at least."""
        if all(max(pair) < self._blocks for pair in pairs):
            self._kernels.copy_blocks(self._pools, pairs)
            return
        for some in rounds(pairs, self._most):
            self._round(some)

    def _place(self, i: int) -> Tensor:
        return self._host[i // self._piece][i % self._piece]

    def _round(self, pairs: list[Pair]) -> None:
        kernels, aside, blocks = self._kernels, self._aside, self._blocks
        inner = [pair for pair in pairs if max(pair) < blocks]
        out = [(block, place - blocks) for block, place in pairs if place >= blocks]
        back = [(place - blocks, block) for place, block in pairs if place >= blocks]
        staging = self._staged[0]
        self._staged.reverse()
        if alone := len(out) + len(back) > len(staging.buffer):  # of a ring, which nothing can cut
            staging = _Staging(kernels.staging(self._pools, len(out) + len(back)), aside)
        leaving, coming = staging.buffer[: len(out)], staging.buffer[len(out) : len(out) + len(back)]
        if back:
            aside.hold_transfers(staging.read)
            for at, (place, _) in zip(coming, back, strict=True):
                aside.transfer(at, self._place(place))
        arrived = aside.of_transfers()
        if out:
            aside.hold_steps(staging.left)
            kernels.gather_blocks(self._pools, [block for block, _ in out], leaving)
            aside.hold_transfers(aside.of_steps())
            for at, (_, place) in zip(leaving, out, strict=True):
                aside.transfer(self._place(place), at)
            staging.left = aside.of_transfers()
        kernels.copy_blocks(self._pools, inner)
        if back:
            aside.hold_steps(arrived)
            kernels.scatter_blocks(self._pools, [block for _, block in back], coming)
        staging.read = aside.of_steps()
        if alone:
            aside.hold_steps(staging.left)  # after which steps may have its memory for something else


def staged_bytes(block_bytes: int, places: int) -> int:
    """That a `HostPool` takes on the device, of blocks of so many bytes in all layers."""
    return 2 * min(_at_once(block_bytes), 2 * places) * block_bytes


def _at_once(block_bytes: int) -> int:
    return max(1, STAGED // block_bytes)


def rounds(pairs: Sequence[Pair], most: int) -> Iterator[list[Pair]]:
    """The same copies, about `most` at a time: within a round all are read before any is written, and nothing is
    written before the round in which the last of its readers is. No two have one target.

    Who reads what a pair writes comes before it, so only rings (as two that change places) must not be cut."""
    writer = {target: i for i, (_, target) in enumerate(pairs)}
    readers = [0] * len(pairs)
    for source, _ in pairs:
        if source in writer:
            readers[writer[source]] += 1
    made: list[Pair] = []
    ahead = [i for i, n in enumerate(readers) if not n]
    for i in ahead:
        made.append(pairs[i])
        if (then := writer.get(pairs[i][0])) is not None:
            readers[then] -= 1
            if not readers[then]:
                ahead.append(then)
        if len(made) == most:
            yield made
            made = []
    left = set(range(len(pairs))).difference(ahead)
    while left:
        ring = [left.pop()]
        while (then := writer[pairs[ring[-1]][0]]) != ring[0]:
            left.remove(then)
            ring.append(then)
        if made and len(made) + len(ring) > most:
            yield made
            made = []
        made += [pairs[i] for i in ring]
    if made:
        yield made
