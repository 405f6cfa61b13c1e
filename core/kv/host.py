"""The second tier of the prefix cache: blocks that were evicted from the pool, with their KV in host memory.

Evicted is then swapped out, not lost; who asks for the prefix again, a preempted sequence as well as a new request, has
it swapped in. A place in host memory is a block id from the pool's size on, so both are copies between blocks: to the
executors they are a bind's copies like any other.

    cached in the pool ──evict: keep──▶ in its place ──least recently swapped out, when all are taken──▶ gone
             ▲                              │ take
             └──────────────────────────────┘

When all are taken, whoever of the tenants has the most gives up its least recently swapped out one: nobody is pushed
out of an equal part of the places by others, and a part that is not used is lent out.

A key of a block says all that its KV depends on, so nothing is kept here but keys, and whose they are. Knows no tree
and no references.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict


class HostTier:
    """`total` places, whose ids begin at `first`."""

    def __init__(self, first: int, total: int) -> None:
        self.total = total
        self.swapped_out = self.swapped_in = 0
        """Blocks so far."""
        self._places: dict[bytes, int] = {}
        self._owner: dict[bytes, str] = {}
        self._of: defaultdict[str, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        """The keys of each tenant that has any, the one that was swapped out first in front."""
        self._having: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """The same tenants, by how many keys they have."""
        self._most = 0
        """The greatest of these numbers."""
        self._free = list(range(first + total - 1, first - 1, -1))
        self._out: dict[int, int] = {}
        """Copies to be made by the bind in the making: by place, the block that was evicted."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def keep(self, key: bytes, block: int, tenant: str) -> None:
        """This block of the tenant's is being evicted from the pool."""
        if not self._free:
            most = self._having[self._most]
            self._forget(next(iter(self._of[tenant if tenant in most else next(iter(most))])))
        place = self._free.pop()
        self._places[key] = place
        self._owner[key] = tenant
        self._of[tenant][key] = None
        self._count(tenant, 1)
        self._out[place] = block
        self.swapped_out += 1

    def take(self, key: bytes) -> int:
        """The block to copy the KV of this key from; it is the pool's again. KeyError if it is not here.

        Its place may be given away at once: a bind's copies are read before any is written."""
        place = self._forget(key)
        self.swapped_in += 1
        return self._out.pop(place, place)  # on its way out, it has not left the pool yet

    def discard(self, key: bytes) -> None:
        """The pool has got this block by itself."""
        if key in self._places:
            self._out.pop(self._forget(key), None)

    def _forget(self, key: bytes) -> int:
        """The place that this leaves."""
        place, tenant = self._places.pop(key), self._owner.pop(key)
        del self._of[tenant][key]
        self._count(tenant, -1)
        self._free.append(place)
        return place

    def _count(self, tenant: str, more: int) -> None:
        """It has one key more, or less: what follows from that, at the same cost for any number of tenants."""
        now = len(self._of[tenant])
        self._having[now - more].pop(tenant, None)
        if now:
            self._having[now][tenant] = None
        else:
            del self._of[tenant]
        self._most = max(self._most, now)
        if not self._having[now - more]:
            del self._having[now - more]
            self._most -= self._most == now - more

    def clear(self) -> int:
        """Keep nothing of what is here; gives how many blocks that were."""
        keys = list(self._places)
        for key in keys:
            self.discard(key)
        return len(keys)

    def settle(self) -> list[tuple[int, int]]:
        """The copies (block, place) of what was swapped out since the last time, to go with this bind."""
        copies = [(block, place) for place, block in self._out.items()]
        self._out.clear()
        return copies

    def audit(self) -> list[str]:
        """What is wrong with the accounts between binds; empty if nothing is."""
        held = [*self._places.values(), *self._free]
        wrong = (
            [] if len(held) == len(set(held)) == self.total else [f"{len(held)} places of {self.total} in host memory"]
        )
        counts = {tenant: len(keys) for tenant, keys in self._of.items()}
        if (
            sorted(key for keys in self._of.values() for key in keys) != sorted(self._places)
            or {tenant: n for n, tenants in self._having.items() for tenant in tenants} != counts
            or self._most != max(counts.values(), default=0)
        ):
            wrong.append("host memory and its tenants disagree")
        if self._out:
            wrong.append(f"{len(self._out)} blocks wait for a bind's copies")
        return wrong
