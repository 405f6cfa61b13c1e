"""The second tier of the prefix cache: blocks that were evicted from the pool, with their KV in host memory.

Evicted is then swapped out, not lost; who asks for the prefix again, a preempted sequence as well as a new request, has
it swapped in. A place in host memory is a block id from the pool's size on, so both are copies between blocks: to the
executors they are a bind's copies like any other.

    cached in the pool ──evict: keep──▶ in its place ──least recently swapped out, when all are taken──▶ gone
             ▲                              │ take
             └──────────────────────────────┘

A key of a block says all that its KV depends on, so nothing is kept here but keys. Knows no tree and no references.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class HostTier:
    """`total` places, whose ids begin at `first`."""

    def __init__(self, first: int, total: int) -> None:
        self.total = total
        self.swapped_out = self.swapped_in = 0
        """Blocks so far."""
        self._places: OrderedDict[bytes, int] = OrderedDict()
        """By key, the one that was swapped out first in front."""
        self._free = list(range(first + total - 1, first - 1, -1))
        self._taken: list[int] = []
        """Swapped in by the bind in the making: nothing may be written there before its copies are made."""
        self._out: dict[int, int] = {}
        """Copies to be made by the bind in the making: by place, the block that was evicted."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def keep(self, key: bytes, block: int) -> None:
        """This block is being evicted from the pool."""
        if self._free:
            place = self._free.pop()
        elif self._places:
            place = self._places.popitem(last=False)[1]
        else:
            return  # all are being swapped in
        self._places[key] = place
        self._out[place] = block
        self.swapped_out += 1

    def take(self, key: bytes) -> int:
        """The block to copy the KV of this key from; it is the pool's again. KeyError if it is not here."""
        place = self._places.pop(key)
        self.swapped_in += 1
        if (block := self._out.pop(place, None)) is not None:  # on its way out: it has not left the pool yet
            self._free.append(place)
            return block
        self._taken.append(place)
        return place

    def discard(self, key: bytes) -> None:
        """The pool has got this block by itself."""
        if (place := self._places.pop(key, None)) is not None:
            self._out.pop(place, None)
            self._free.append(place)

    def settle(self) -> Iterator[tuple[int, int]]:
        """The copies (block, place) of what was swapped out since the last time, to go with this bind."""
        copies = [(block, place) for place, block in self._out.items()]
        self._out.clear()
        self._free += self._taken
        self._taken.clear()
        return iter(copies)

    def audit(self) -> list[str]:
        """What is wrong with the accounts between binds; empty if nothing is."""
        held = [*self._places.values(), *self._free]
        wrong = (
            [] if len(held) == len(set(held)) == self.total else [f"{len(held)} places of {self.total} in host memory"]
        )
        if self._taken or self._out:
            wrong.append(f"{len(self._taken)} places and {len(self._out)} blocks wait for a bind's copies")
        return wrong
