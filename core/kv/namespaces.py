"""Cache namespaces by small numbers, which columns and eviction policies can hold.

A client may name a namespace of its own with every request, so numbers whose namespace has nothing here any more are
given out again: there are never more than about twice as many as blocks and residencies can use. Knows no blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice

FEWEST = 64
"""So many are kept before it is asked which have anything."""


class Namespaces:
    def __init__(self) -> None:
        self._index: dict[bytes, int] = {}
        self._unused: list[int] = []
        self._sweep_at = FEWEST
        self.tenants: tuple[str, ...] = ()
        """Of each number, the tenant that its namespace belongs to."""

    def __getitem__(self, namespace: bytes) -> int:
        """Raises KeyError if `take` was not called for it, or not since it had nothing any more."""
        return self._index[namespace]

    def get(self, namespace: bytes) -> int:
        """-1 if it is not known."""
        return self._index.get(namespace, -1)

    def items(self) -> Collection[tuple[bytes, int]]:
        return self._index.items()

    def latest(self, count: int) -> Iterator[bytes]:
        """Those that were taken last."""
        return islice(reversed(self._index), count)

    def take(self, namespace: bytes, tenant: str, in_use: Callable[[], Collection[int]]) -> int:
        """Its number, an unused one if it had none. `in_use` tells the numbers that are held somewhere."""
        if namespace in self._index:
            return self._index[namespace]
        if len(self._index) >= self._sweep_at:
            self._sweep(in_use())
        if self._unused:
            index = self._unused.pop()
            self.tenants = (*self.tenants[:index], tenant, *self.tenants[index + 1 :])
        else:
            index = len(self.tenants)
            self.tenants = (*self.tenants, tenant)
        self._index[namespace] = index
        return index

    def _sweep(self, held: Collection[int]) -> None:
        for namespace, index in list(self._index.items()):
            if index not in held:
                del self._index[namespace]
                self._unused.append(index)
        self._sweep_at = max(FEWEST, 2 * len(self._index))
