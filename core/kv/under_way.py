"""What steps under way compute of prompts, and when it enters the prefix tree: once its step has gone well.

The core puts a chunk whose residency is still there into the tree. Of one that is released before, the blocks are
*held*: in the tree, so that they can be evicted, but under keys that nobody finds. They are confirmed, or withdrawn, by
the first plan that knows how their step went.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from octavo.core.kv.pool import NO_BLOCK, BlockPool, chain_key, held_key
from octavo.core.kv.residency import Residency


class Chunk(NamedTuple):
    """A chunk that is planned, up to a position."""

    step: int
    slot: int
    open_id: int
    upto: int


class Held(NamedTuple):
    """A block of a chunk whose residency was released before its step was over."""

    step: int
    open_id: int
    block: int
    key: bytes


class UnderWay:
    """Blocks have `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chunks: list[Chunk] = []
        self.held: list[Held] = []
        """Of each residency parents first."""

    def __bool__(self) -> bool:
        return bool(self._chunks or self.held)

    def planned(self, step: int, slot: int, open_id: int, upto: int) -> None:
        self._chunks.append(Chunk(step, slot, open_id, upto))

    def gone_well(self, taken: int, failed: set[int]) -> Iterator[Chunk]:
        """Chunks of steps up to `taken`, but of residencies that `failed` (by open_id); these and those are forgotten.
        Never before the result: a scheduler that dies with the news of a failure leaves nothing behind to read."""
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            if chunk.step <= taken and chunk.open_id not in failed:
                yield chunk
            elif chunk.open_id not in failed:
                self._chunks.append(chunk)

    def confirm(self, pool: BlockPool, taken: int, failed: set[int]) -> None:
        """Of a residency all that is behind a block which cannot be confirmed goes with it."""
        lost, left, withdrawn = set(failed), list[Held](), list[Held]()
        for held in self.held:
            if held.open_id not in lost and held.step > taken:
                left.append(held)
            elif held.open_id in lost or not pool.confirm(held.block, held.open_id, held.key):
                lost.add(held.open_id)
                withdrawn.append(held)
        _withdraw(pool, withdrawn)
        self.held = left

    def hold(self, pool: BlockPool, residency: Residency, tenant: int) -> None:
        """What chunks under way compute for a residency that is released is not lost: it may come back soon."""
        size, table, tokens = self._block_size, residency.table, residency.tokens
        at = len(residency.keys)
        key = residency.keys[-1] if at else residency.namespace
        for chunk in self._chunks:
            if chunk.open_id != residency.open_id:
                continue
            for i in range(at, min(chunk.upto, len(tokens)) // size):
                ids = tokens[i * size : (i + 1) * size].tobytes()
                key = chain_key(key, ids)
                if pool.shared(table[i]) or pool.find(key) is not None:
                    return
                pool.insert(table[i], held_key(key, residency.open_id), table[i - 1] if i else NO_BLOCK, ids, tenant)
                pool.touch(table[i], pool.now_ns, keep_ns=residency.keep_ns)
                self.held.append(Held(chunk.step, residency.open_id, table[i], key))
            at = max(at, chunk.upto // size)

    def forget(self, pool: BlockPool) -> None:
        """Nobody will tell how the steps went."""
        self._chunks = []
        _withdraw(pool, self.held)
        self.held = []


def _withdraw(pool: BlockPool, held: list[Held]) -> None:
    pool.withdraw((one.block, one.open_id, one.key) for one in reversed(held))
