"""The block pool and the prefix tree over it: who holds which block, and which cached block stands for which prefix.

The tree is block-granular: a node is a full block, its key the hash of its tokens chained with its parent's key, so
a prefix is found by walking keys. Everything about a node lives in columns indexed by block id.

    free ──allocate──▶ in use ──insert──▶ in use and cached ──last release──▶ cached (evictable)
      ▲                   │ last release                                            │ evict
      └───────────────────┴─────────────────────────────────────────────────────────┘ (swapped out, if there is
                                                                                         a host tier: see `host`)

What a residency leaves behind whose step is not over is cached under a *held* key: it can be evicted, nobody finds it.

Knows nothing of slots, requests or priority; times and tenants pass through it to the eviction policy.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

import numpy as np

from octavo.core.kv.host import HostTier
from octavo.core.kv.written import read
from octavo.policies.contract import Eviction, Leaves, Mask

NO_BLOCK = -1

KEPT_SHARE = 0.5
"""Most of the pool that requests can have kept."""

REMEMBERED = 4
"""Evicted keys that are remembered, as a multiple of the pool."""


KEY_BYTES = 16
"""Of a key that can be found."""

COMPARED = 256
"""Cached blocks that a missed one is compared with, to find the first token that differs."""


class Miss(NamedTuple):
    """Why a block is not in the tree, as the event `request.matched` explains it."""

    reason: str
    common: int = 0
    """Tokens of the block that a cached one has, too, before the first that differs."""
    evicted_ns: int = 0


class OutOfBlocks(Exception):
    """Nothing is free and nothing can be evicted: the scheduler spent credit it did not have."""


def chain_key(parent: bytes, block_tokens: bytes) -> bytes:
    """Key of a block: sha256 over its parent's key (the namespace, for the first block) and its int32 ids."""
    return sha256(parent + block_tokens).digest()[:KEY_BYTES]


def held_key(key: bytes, open_id: int) -> bytes:
    """In place of `key` until the step that computes the block for this residency has gone well: not to be found."""
    return key + open_id.to_bytes(8, "little")


class BlockPool:
    """`total` blocks of equal size.

    Always: free + cached-and-unreferenced + referenced = total. A table that refers to a cached block refers to
    all of its ancestors too, so an unreferenced node has no referenced descendant and can be evicted leaf by leaf.
    """

    def __init__(self, total: int, eviction: Eviction, host: HostTier | None = None) -> None:
        self.total = total
        self.host = host
        """Where evicted blocks go; None: nowhere."""
        self.evictable = 0
        self.evicted = 0
        self._eviction = eviction
        self._free = list(range(total - 1, -1, -1))
        self._refs = [0] * total
        self._key: list[bytes | None] = [None] * total
        self._parent = [NO_BLOCK] * total
        self._by_key: dict[bytes, int] = {}
        self._below: dict[int, dict[int, bytes]] = {NO_BLOCK: {}}
        """Children of a block and their tokens (int32), oldest first: only to tell why a prefix is not found."""
        self._children = np.zeros(total, dtype=np.int32)
        self._depth = np.zeros(total, dtype=np.int32)
        self._hits = np.zeros(total, dtype=np.int32)
        self._tenant = np.zeros(total, dtype=np.int32)
        self._tenant_blocks = np.zeros(1, dtype=np.int32)
        """Cached blocks per tenant."""
        self.now_ns = 0
        """Time of the step being bound, for eviction policies; whoever drives the pool sets it."""
        self.tenants: tuple[str, ...] = ()
        """Names by index, for eviction policies; as above."""
        self._used_ns = np.zeros(total, dtype=np.int64)
        self._used = np.zeros(total, dtype=np.int64)
        self._keep_ns = np.zeros(total, dtype=np.int64)
        """Until when a cached block is to be kept."""
        self._keep_most_ns = 0
        self._nothing: Mask = np.zeros(total, dtype=np.bool_)
        self._unreferenced = np.zeros(total, dtype=np.bool_)
        """Cached and without a reference: what eviction may take."""
        self._clock = 0
        self._gone: dict[bytes, int] = {}
        """When keys were evicted, oldest first: only to tell why a prefix is not found."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        return len(self._free) + self.evictable

    @property
    def tenant_blocks(self) -> list[int]:
        """Cached blocks per tenant."""
        held: list[int] = self._tenant_blocks.tolist()
        return held

    @property
    def cached(self) -> int:
        return len(self._by_key)

    def allocate(self) -> int:
        """A block with one reference and no key; evicts if nothing is free."""
        if not self._free:
            self._evict(1)
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def reserve(self, need: int) -> None:
        """Evict so that the next `need` allocations find free blocks."""
        if need > len(self._free):
            self._evict(need - len(self._free))

    def acquire(self, block: int) -> None:
        """One more reference to a block that is in use or cached."""
        if self._refs[block] == 0:
            self.evictable -= 1
            self._unreferenced[block] = False
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one frees the block, or leaves it cached."""
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._key[block] is None:
                self._free.append(block)
            else:
                self.evictable += 1
                self._unreferenced[block] = True

    def shared(self, block: int) -> bool:
        """Whether several tables refer to it."""
        return self._refs[block] > 1

    def find(self, key: bytes) -> int | None:
        """The block that stands for this prefix, if it is cached."""
        return self._by_key.get(key)

    def why_missing(self, key: bytes, parent: int, tokens: bytes, tenant: int) -> Miss:
        """Why `find` gives nothing for `key`, the tenant's block of these int32 ids after `parent` (NO_BLOCK at the
        root)."""
        if (evicted_ns := self._gone.get(key)) is not None:
            return Miss("evicted", evicted_ns=evicted_ns)
        last = islice(reversed(self._below.get(parent, {}).items()), COMPARED)
        own = b"".join(other for block, other in last if self._tenant[block] == tenant and not self._is_held(block))
        if not own:
            return Miss("new" if parent == NO_BLOCK else "ends")
        common = _common(tokens, own)
        if _common(read(tokens), read(own)) > common:
            return Miss("generated", common)
        return Miss("differs" if common or parent != NO_BLOCK else "new", common)

    def insert(self, block: int, key: bytes, parent: int, tokens: bytes, tenant: int = 0) -> int:
        """Put a full block under its parent block (NO_BLOCK at the root); gives the block that holds this prefix
        from now on, which is another one if the tree had it already. `tokens` are its int32 ids, `tenant` is its
        namespace's index."""
        canonical = self._by_key.get(key)
        if canonical is not None:
            return canonical
        self._name(block, key)
        self._parent[block] = parent
        self._hits[block] = self._keep_ns[block] = 0
        self._tenant[block] = tenant
        if tenant >= len(self._tenant_blocks):
            self._tenant_blocks = np.pad(self._tenant_blocks, (0, tenant + 1 - len(self._tenant_blocks)))
        self._tenant_blocks[tenant] += 1
        self._depth[block] = 0
        self._below.setdefault(parent, {})[block] = tokens
        if parent != NO_BLOCK:
            self._children[parent] += 1
            self._depth[block] = self._depth[parent] + 1
        return block

    def confirm(self, block: int, open_id: int, key: bytes) -> bool:
        """Let a block that is in the tree under its held key be found. False if another block stands for this prefix,
        or it has been evicted meanwhile."""
        held = held_key(key, open_id)
        if self._by_key.get(held) != block or key in self._by_key:
            return False
        del self._by_key[held]
        self._name(block, key)
        return True

    def _name(self, block: int, key: bytes) -> None:
        self._by_key[key], self._key[block] = block, key
        self._gone.pop(key, None)
        if self.host is not None:
            self.host.discard(key)

    def withdraw(self, held: Iterable[tuple[int, int, bytes]]) -> None:
        """Take blocks that will not be confirmed (block, open_id, key) out of the tree, children first."""
        self._take_out([b for b, open_id, key in held if self._by_key.get(held_key(key, open_id)) == b])

    def touch(self, block: int, now_ns: int, *, hit: bool = False, keep_ns: int = 0) -> None:
        """Note a use of a cached block, for eviction policies. It is to be kept for `keep_ns` from now on."""
        self._clock += 1
        self._used[block] = self._clock
        self._used_ns[block] = now_ns
        if hit:
            self._hits[block] += 1
        if keep_ns:
            self._keep_ns[block] = max(int(self._keep_ns[block]), now_ns + keep_ns)
            self._keep_most_ns = max(self._keep_most_ns, now_ns + keep_ns)

    def _evict(self, need: int) -> None:
        """Evict `need` blocks, lowest score first, those that are to be kept last. A parent becomes a leaf when its
        last child goes."""
        if need > self.evictable:
            raise OutOfBlocks(f"{need} blocks to evict, {self.evictable} evictable, {self.free} free of {self.total}")
        leaves = np.flatnonzero(self._unreferenced & (self._children == 0))
        kept = self._kept()
        heap = list(zip(kept[leaves].tolist(), self._score(need, leaves), leaves.tolist(), strict=True))
        heapq.heapify(heap)
        for left in range(need, 0, -1):
            *_, block = heapq.heappop(heap)
            if self.host is not None and (key := self._key[block]) is not None and not self._is_held(block):
                self.host.keep(key, block, self._owner(block))
            parent = self._forget(block)
            if parent != NO_BLOCK and self._unreferenced[parent] and self._children[parent] == 0:
                (score,) = self._score(left, np.asarray([parent]))
                heapq.heappush(heap, (bool(kept[parent]), score, parent))

    def _owner(self, block: int) -> str:
        """The tenant, who may have several namespaces."""
        index = int(self._tenant[block])
        return self.tenants[index] if index < len(self.tenants) else ""

    def _kept(self) -> Mask:
        """Which blocks are to be kept now, shape [total]. Of every tenant that has such blocks the most recently used
        ones, up to its equal part of `KEPT_SHARE` of the pool: nobody can keep the others out."""
        if self._keep_most_ns <= self.now_ns:
            return self._nothing
        kept = self._keep_ns > self.now_ns
        each = np.bincount(self._tenant[kept], minlength=1)
        most = int(KEPT_SHARE * self.total / max(1, int((each > 0).sum())))
        for tenant in np.flatnonzero(each > most).tolist():
            own = np.flatnonzero(kept & (self._tenant == tenant))
            kept[own[np.argsort(-self._used[own], kind="stable")[most:]]] = False
        return kept

    def _score(self, need: int, leaves: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[float]:
        view = Leaves(
            last_used_ns=self._used_ns[leaves],
            last_used=self._used[leaves],
            hits=self._hits[leaves],
            depth=self._depth[leaves],
            tenant=self._tenant[leaves],
            held=self._tenant_blocks.copy(),
            now_ns=self.now_ns,
            tenants=self.tenants,
        )
        for column in (view.last_used_ns, view.last_used, view.hits, view.depth, view.tenant, view.held):
            column.flags.writeable = False
        scores: list[float] = self._eviction.rank(need, view).tolist()
        return scores

    def cached_in_use(self) -> list[int]:
        """Of each tenant, the cached blocks that somebody refers to."""
        cached = np.zeros(self.total, dtype=np.bool_)
        cached[list(self._by_key.values())] = True
        used = np.bincount(self._tenant[cached & ~self._unreferenced], minlength=len(self._tenant_blocks))
        held: list[int] = used.tolist()
        return held

    def is_cached(self, block: int) -> bool:
        return self._key[block] is not None

    def _is_held(self, block: int) -> bool:
        """Whether it is in the tree under a held key."""
        key = self._key[block]
        return key is not None and len(key) != KEY_BYTES

    def flush(self, tenants: Container[int], prefix: bytes = b"") -> tuple[int, int]:
        """Take out of the tree what is there of these tenants' sequences that begin with these int32 ids: what lies
        behind the prefix, and of the prefix itself what nothing else hangs on. Gives how many blocks are free now, and
        how many somebody still refers to: those are free with the last reference."""
        behind, along = self._find_below(tenants, prefix)
        return self._take_out(self._leaves_first(behind) + along[::-1])

    def _take_out(self, blocks: list[int]) -> tuple[int, int]:
        """Of these, children first, what has nothing below it leaves the tree; as `flush` counts it."""
        freed = in_use = 0
        for block in blocks:
            if self._children[block]:
                continue
            self._unlink(block)
            if self._refs[block]:
                in_use += 1
            else:
                freed += 1
                self.evictable -= 1
                self._free.append(block)
        return freed, in_use

    def _find_below(self, tenants: Container[int], prefix: bytes) -> tuple[list[int], list[int]]:
        """The blocks that hold the prefix's last id, and those that hold the ids before it, outer ones first."""
        level = [(block, ids) for block, ids in self._below[NO_BLOCK].items() if int(self._tenant[block]) in tenants]
        along: list[int] = []
        while level:
            size = len(level[0][1])
            level = [(block, ids) for block, ids in level if read(ids).startswith(prefix[:size])]
            if len(prefix) <= size:
                return [block for block, _ in level], along
            prefix = prefix[size:]
            along += [block for block, _ in level]
            level = [item for block, _ in level for item in self._below.get(block, {}).items()]
        return [], along

    def _leaves_first(self, tops: list[int]) -> list[int]:
        """These blocks and all below them."""
        found = list(tops)
        for block in found:
            found += self._below.get(block, ())
        return found[::-1]

    def _forget(self, block: int) -> int:
        """Evict an unreferenced leaf; gives its parent."""
        key = self._key[block]
        if key is not None and not self._is_held(block):
            self._gone[key] = self.now_ns
            if len(self._gone) > REMEMBERED * self.total:
                del self._gone[next(iter(self._gone))]
        parent = self._unlink(block)
        self.evictable -= 1
        self.evicted += 1
        self._free.append(block)
        return parent

    def _unlink(self, block: int) -> int:
        """Take a leaf out of the tree; gives its parent."""
        key, parent = self._key[block], self._parent[block]
        if key is not None:
            del self._by_key[key]
            self._tenant_blocks[self._tenant[block]] -= 1
            siblings = self._below[parent]
            del siblings[block]
            if not siblings and parent != NO_BLOCK:
                del self._below[parent]
        self._key[block] = None
        self._keep_ns[block] = 0
        self._parent[block] = NO_BLOCK
        self._unreferenced[block] = False
        if parent != NO_BLOCK:
            self._children[parent] -= 1
        return parent

    def audit(self, tables: Iterable[Iterable[int]]) -> list[str]:
        """What is wrong with the accounts, given all block tables; empty if nothing is. O(total)."""
        refs = Counter(block for table in tables for block in table)
        wrong = []
        free = set(self._free)
        if len(free) != len(self._free):
            wrong.append("a block is free twice")
        for block in range(self.total):
            cached = self._key[block] is not None
            if self._refs[block] != refs[block]:
                wrong.append(f"block {block}: {self._refs[block]} references counted, {refs[block]} held")
            if (block in free) != (refs[block] == 0 and not cached):
                wrong.append(f"block {block}: free {block in free}, references {refs[block]}, cached {cached}")
            if bool(self._unreferenced[block]) != (cached and refs[block] == 0):
                wrong.append(f"block {block}: evictable {bool(self._unreferenced[block])}, references {refs[block]}")
            parent = self._parent[block]
            if cached and parent != NO_BLOCK and self._key[parent] is None:
                wrong.append(f"block {block}: its parent {parent} is not cached")
            if cached and parent != NO_BLOCK and refs[block] > 0 and refs[parent] == 0:
                wrong.append(f"block {block} is referenced, its parent {parent} is not")
        children = Counter(p for p in self._parent if p != NO_BLOCK)
        wrong += [
            f"block {block}: {n} children counted, {children[block]} there"
            for block, n in enumerate(self._children.tolist())
            if n != children[block]
        ]
        if self.evictable != int(self._unreferenced.sum()):
            wrong.append(f"{self.evictable} evictable counted, {int(self._unreferenced.sum())} there")
        if len(self._by_key) != sum(key is not None for key in self._key):
            wrong.append("the tree and the blocks' keys disagree")
        if self.host is not None:
            wrong += self.host.audit()
            if twice := sum(key in self.host for key in self._by_key):
                wrong.append(f"{twice} blocks are in the pool and in host memory")
        return wrong


def _common(block: bytes, others: bytes) -> int:
    """Most int32 ids that a block has in common with one of others of its length before the first that differs."""
    ids = np.frombuffer(block, dtype=np.int32)
    same = np.frombuffer(others, dtype=np.int32).reshape(-1, len(ids)) == ids
    return int(np.logical_and.accumulate(same, axis=1).sum(axis=1).max(initial=0))
