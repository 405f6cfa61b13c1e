"""A sequence in a slot, as the KV-manager knows it. Knows no pool and no plan."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from octavo.core.kv.written import read


@dataclass(slots=True)
class Residency:
    """Its ids as the tree knows them, its block table, and how much of it is in the tree.

    `keys[i]` is the chained key of full block i, for the blocks that have entered the tree."""

    open_id: int
    namespace: bytes
    tokens: array[int]
    table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    keep_ns: int = 0
    """How long its blocks are to be kept after use, if they can be."""
    cut: bool = False
    """Some of it was flushed, or would have been: nothing more of it enters the tree."""

    def begins_with(self, prefix: bytes) -> bool:
        """`prefix` as int32 ids."""
        return read(self.tokens[: len(prefix) // self.tokens.itemsize].tobytes()) == prefix
