"""The KV-manager's pure core: binds each plan to blocks.

It validates every item of a plan and skips a bad one (answering a rebase), never the step. It decides nothing by
time or priority. Its state has one generation: for a new one the shell makes a new core.

Everything the executors run is in bind order, which is why a block may be given away the moment its last
reference goes: whatever still uses it runs before the new owner.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from octavo.core.kv.host import HostTier
from octavo.core.kv.namespaces import Namespaces
from octavo.core.kv.pool import NO_BLOCK, BlockPool, chain_key
from octavo.core.kv.residency import Residency
from octavo.core.kv.under_way import UnderWay
from octavo.core.kv.written import written
from octavo.core.machine import Outbound, Outputs
from octavo.core.messages import (
    EMPTY,
    Body,
    Col,
    Flush,
    Fork,
    Kind,
    KvState,
    Match,
    Matched,
    Open,
    PeerDown,
    PeerUp,
    Role,
    StepAck,
    StepBind,
    StepPlan,
    SwapPolicy,
    Tick,
    Weigh,
    col,
    cols,
    namespace_name,
)
from octavo.core.policy import PolicyHost
from octavo.core.trace.catalogue import Event, KvEvicted, KvFlushed, KvLeak, KvOverdraft, StepBound

SHOWN_NAMESPACES = 8

COMPARED_TENANTS = 32
"""Other namespaces that are looked at to tell why a prefix is not found."""

SWAPPED = -2
"""In place of a block that is in host memory."""

REFUSED = -1
"""Rebase end of a residency that does not exist (a refused fork, a slot that is not open)."""


@dataclass(slots=True)
class _Binding:
    """The bind in the making."""

    opened: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    deltas: list[tuple[int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    rebases: list[tuple[int, int, int]] = field(default_factory=list)
    allocated: int = 0
    swapped_in: int = 0
    events: list[Event] = field(default_factory=list)


class KvCore:
    """Owns block ids, reference counts, block tables and the prefix tree of one replica.

    `slots` is the number of slots of the scheduler; `generation` that of this state."""

    def __init__(
        self,
        *,
        total_blocks: int,
        block_size: int,
        slots: int,
        eviction: PolicyHost,
        generation: int,
        caching: bool = True,
        host_blocks: int = 0,
        prompts_apart: bool = False,
    ) -> None:
        self.generation = generation
        self._prompts_apart = prompts_apart
        self._host_blocks = host_blocks
        self.pool = self._new_pool(total_blocks, eviction)
        self._eviction = eviction
        self._block_size = block_size
        self._caching = caching
        self._residencies: list[Residency | None] = [None] * slots
        self._open_ids = np.full(slots, -1, dtype=np.int32)
        self._ends = np.zeros(slots, dtype=np.int32)
        """Per slot, the tokens that its table is bound for."""
        self._held = np.zeros(slots, dtype=np.int32)
        """Per slot, blocks in its table."""
        self._known = np.zeros(slots, dtype=np.int32)
        """Per slot, the tokens known when it was opened: a decode must come after all of them."""
        self._told = -1
        """The available blocks that the scheduler knows of."""
        self.under_way = UnderWay(block_size)
        self._namespaces = Namespaces()
        """Every tenant has its own; their numbers are for eviction policies."""

    @property
    def policy_stats(self) -> dict[str, int]:
        """As the scheduler's, of the eviction policy."""
        return self._eviction.stats

    def apply(self, now_ns: int, message: Body) -> Outputs:
        match message:
            case StepPlan():
                return self._bind(message)
            case Match():
                matched = self._match(message)
                return Outputs([Outbound(Role.SCHEDULER, matched)], [])
            case PeerUp(role=Role.SCHEDULER):
                self._release_all()
                self._told = self.pool.available
                state = KvState(self.pool.total, self.pool.free, self.pool.evictable)
                return Outputs([Outbound(Role.SCHEDULER, state)], [])
            case PeerDown(role=Role.SCHEDULER):
                self._release_all()
                return Outputs([], self._check_idle())
            case Flush():
                return Outputs([], [self._flush(message), *self._check_idle()])
            case SwapPolicy():
                self._eviction.swap(message.group, message.name, message.options, message.disabled)
                return Outputs([], self._eviction.drain_events())
            case Weigh():
                self._eviction.weigh(message.weights)
                return Outputs([], self._eviction.drain_events())
            case PeerUp() | PeerDown() | Tick():
                return Outputs([], [])
            case _:
                raise TypeError(f"the KV-manager takes no {type(message).__name__}")

    @property
    def block_size(self) -> int:
        """In tokens."""
        return self._block_size

    @property
    def cached_by_namespace(self) -> dict[str, int]:
        """Blocks in the prefix tree by the first bytes of their namespace, of those with the most."""
        held = self.pool.tenant_blocks
        each = [(held[index], name) for name, index in self._namespaces.items() if index < len(held)]
        most = sorted(each, reverse=True)[:SHOWN_NAMESPACES]
        return {namespace_name(name): blocks for blocks, name in most if blocks}

    def by_tenant(self) -> list[tuple[str, int, int]]:
        """Of each tenant that has any: its name, its blocks in the prefix tree, and of these the ones in use."""
        cached, used = self.pool.tenant_blocks, self.pool.cached_in_use()
        rows = zip(self.pool.tenants, cached, used, strict=False)
        return sorted(row for row in rows if row[1])

    def tables(self) -> list[list[int]]:
        """The block tables of all residencies."""
        return [r.table for r in self._residencies if r is not None]

    def _check_idle(self) -> list[Event]:
        """With nothing resident, free + cached = total. If not: say so with a dump, and start with an empty pool."""
        pool = self.pool
        if any(r is not None for r in self._residencies) or pool.free + pool.cached == pool.total == pool.available:
            return []
        leak = KvLeak(
            total=pool.total,
            free=pool.free,
            cached=pool.cached,
            in_use=pool.total - pool.available,
            dump="; ".join(pool.audit(())),
        )
        self.pool = self._new_pool(pool.total, self._eviction)
        self.pool.tenants = pool.tenants
        return [leak]

    def _new_pool(self, total: int, eviction: PolicyHost) -> BlockPool:
        return BlockPool(total, eviction, HostTier(total, self._host_blocks) if self._host_blocks else None)

    def _flush(self, flush: Flush) -> KvFlushed:
        """Also of what is resident nothing enters the tree any more, if it is what is to be flushed or hangs on it.
        Host memory is emptied whatever is meant: of what is there only keys are known."""
        tenants = self._namespaces.tenants
        chosen = {i for _, i in self._namespaces.items() if flush.tenant is None or tenants[i] == flush.tenant}
        prefix = np.ascontiguousarray(flush.ids, dtype=np.int32).tobytes()
        freed, in_use = self.pool.flush(chosen, prefix)
        for residency in self._residencies:
            if residency is None:
                continue
            if self._namespaces[residency.namespace] in chosen and residency.begins_with(prefix):
                residency.cut = True
        self._cut_off()
        places = 0 if self.pool.host is None else self.pool.host.clear()
        return KvFlushed(
            tenant=flush.tenant, prefix_tokens=len(flush.ids), freed=freed, in_use=in_use, from_host=places
        )

    def _cut_off(self) -> None:
        """Nothing more enters the tree of residencies whose beginning has left it."""
        for residency in self._residencies:
            if residency is not None and not all(map(self.pool.is_cached, residency.table[: len(residency.keys)])):
                residency.cut = True

    # ── binding ──────────────────────────────────────────────────────────────────────────────────

    def _bind(self, plan: StepPlan) -> Outputs:
        binding = _Binding()
        evicted_before = self.pool.evicted
        host = self.pool.host
        swapped_before = 0 if host is None else host.swapped_out
        now_ns = self.pool.now_ns = plan.now_ns
        if self.under_way:
            self._take_results(binding, plan)
        if len(plan.commit_slot):
            self._commit(binding, plan)
        for slot, open_id in zip(plan.release_slot.tolist(), plan.release_open_id.tolist(), strict=True):
            self._release(slot, open_id)
        for opening in plan.opens:
            self._open(binding, opening, now_ns)
        for forking in plan.forks:
            self._fork(binding, forking)
        self._bind_items(binding, plan)
        if host is not None:
            binding.copies += host.settle()
        evicted = self.pool.evicted - evicted_before
        repaired = self._check_idle()  # before the ack: the scheduler may wait for what it frees
        bind = self._step_bind(plan.step, binding)
        messages = [Outbound(Role.EXECUTOR, bind)]
        available = self.pool.available
        if plan.needs_ack or binding.rebases or available != self._told:
            self._told = available
            ack = StepAck(plan.step, self.pool.free, self.pool.evictable, *cols(binding.rebases, 3))
            messages.append(Outbound(Role.SCHEDULER, ack))
        events = [
            *binding.events,
            StepBound(
                step=plan.step,
                allocated=binding.allocated,
                free=self.pool.free,
                evictable=self.pool.evictable,
                evicted=evicted,
                copies=len(binding.copies),
                swapped_in=binding.swapped_in,
                skipped=len(binding.skipped),
                policy_ns=self._eviction.take_spent_ns(),
            ),
        ]
        if evicted:
            swapped = 0 if host is None else host.swapped_out - swapped_before
            events.append(KvEvicted(step=plan.step, blocks=evicted, swapped_out=swapped))
        events += repaired + self._eviction.drain_events()
        return Outputs(messages, events)

    def _step_bind(self, step: int, binding: _Binding) -> StepBind:
        # A slot released after its commit has no table left to re-point; its successor has another open_id.
        deltas = [d for d in binding.deltas if self._open_ids[d[0]] == d[1]]
        opened = [(slot, open_id, 0, length, len(table)) for slot, open_id, length, table in binding.opened]
        opened_slot, opened_open_id, opened_group, opened_len, opened_n = cols(opened, 5)
        delta_slot, delta_group, delta_index, delta_block = cols([(d[0], 0, d[2], d[3]) for d in deltas], 4)
        copy_src, copy_dst = cols(binding.copies, 2)
        return StepBind(
            kv_gen=self.generation,
            step=step,
            opened_slot=opened_slot,
            opened_open_id=opened_open_id,
            opened_group=opened_group,
            opened_len=opened_len,
            opened_n=opened_n,
            opened_blocks=col([block for *_, table in binding.opened for block in table]) if opened else EMPTY,
            delta_slot=delta_slot,
            delta_group=delta_group,
            delta_index=delta_index,
            delta_block=delta_block,
            copy_src=copy_src,
            copy_dst=copy_dst,
            skipped=col(binding.skipped) if binding.skipped else EMPTY,
        )

    def _resident(self, slot: int, open_id: int) -> Residency | None:
        if not 0 <= slot < len(self._residencies):
            return None
        residency = self._residencies[slot]
        return residency if residency is not None and residency.open_id == open_id else None

    def _take_results(self, binding: _Binding, plan: StepPlan) -> None:
        failed = set(plan.failed)
        self.under_way.confirm(self.pool, plan.taken, failed)
        for chunk in self.under_way.gone_well(plan.taken, failed):
            if (residency := self._resident(chunk.slot, chunk.open_id)) is not None:
                self._insert(binding, chunk.slot, residency, chunk.upto, plan.now_ns)

    def _commit(self, binding: _Binding, plan: StepPlan) -> None:
        at, tokens = 0, self._known_as(plan.commit_tokens, 0)
        for slot, open_id, kv_len, n in zip(
            plan.commit_slot.tolist(),
            plan.commit_open_id.tolist(),
            plan.commit_kv_len.tolist(),
            plan.commit_n.tolist(),
            strict=True,
        ):
            if (residency := self._resident(slot, open_id)) is not None:
                residency.tokens.extend(tokens[at : at + n].tolist())
                self._insert(binding, slot, residency, kv_len, plan.now_ns)
            at += n

    def _insert(self, binding: _Binding, slot: int, residency: Residency, upto: int, now_ns: int) -> None:
        """Put the residency's full blocks below position `upto` into the tree; where the tree has the prefix
        already, re-point the table to the canonical block and give up the duplicate."""
        if not self._caching or residency.cut:
            return
        size, table, keys = self._block_size, residency.table, residency.keys
        tenant = self._namespaces[residency.namespace]
        for i in range(len(keys), min(upto, len(residency.tokens)) // size):
            tokens = residency.tokens[i * size : (i + 1) * size].tobytes()
            key = chain_key(keys[-1] if keys else residency.namespace, tokens)
            block = table[i]
            canonical = self.pool.insert(block, key, table[i - 1] if i else NO_BLOCK, tokens, tenant)
            if canonical != block:
                if self.pool.shared(block):
                    break  # a fork's table would stay as it is, beside the tree; a later insert tries again
                self.pool.acquire(canonical)
                self.pool.release(block)
                table[i] = canonical
                binding.deltas.append((slot, residency.open_id, i, canonical))
            self.pool.touch(canonical, now_ns, keep_ns=residency.keep_ns)
            keys.append(key)

    def _release(self, slot: int, open_id: int) -> None:
        residency = self._resident(slot, open_id)
        if residency is None:
            return
        if self._caching and not residency.cut:
            self.under_way.hold(self.pool, residency, self._namespaces[residency.namespace])
        for block in residency.table:
            self.pool.release(block)
        self._residencies[slot] = None
        self._open_ids[slot] = -1

    def _release_all(self) -> None:
        self.under_way.forget(self.pool)
        for slot, residency in enumerate(self._residencies):
            if residency is not None:
                self._release(slot, residency.open_id)

    def _lookup(self, namespace: bytes, ids: Col, limit: int) -> list[tuple[bytes, int]]:
        """(key, block) of the longest cached prefix of whole blocks within the first `limit` tokens; SWAPPED for those
        at its end that are in host memory."""
        if not self._caching:
            return []
        size = self._block_size
        data = np.ascontiguousarray(ids, dtype=np.int32).tobytes()
        host = self.pool.host
        found: list[tuple[bytes, int]] = []
        key = namespace
        for i in range(min(limit, len(ids)) // size):
            key = chain_key(key, data[4 * i * size : 4 * (i + 1) * size])
            block = SWAPPED if found and found[-1][1] == SWAPPED else self.pool.find(key)
            if block is None or block == SWAPPED:  # what is below a block that left the pool left it before
                if host is None or key not in host:
                    break
                block = SWAPPED
            found.append((key, block))
        return found

    def _known_as(self, ids: Col, prompt_len: int) -> Col:
        """As the tree knows them: see written.py."""
        return written(ids, prompt_len) if self._prompts_apart else ids

    def _match(self, match: Match) -> Matched:
        limit, size = len(match.ids) - 1, self._block_size
        ids = self._known_as(match.ids, match.prompt_len)
        found = self._lookup(match.namespace, ids, limit)
        end = len(found) * size
        swapped = sum(block == SWAPPED for _, block in found) * size
        if not self._caching:
            return Matched(match.seq, end, "disabled", end)
        if limit < size:
            return Matched(match.seq, end, "short", end)
        if end + size > limit:
            return Matched(match.seq, end, "", end, swapped=swapped)
        if not found and (elsewhere := self._elsewhere(match.namespace, ids, limit)):
            return Matched(match.seq, end, "tenant", elsewhere)
        parent_key, parent = found[-1] if found else (match.namespace, NO_BLOCK)
        tokens = ids[end : end + size].tobytes()
        tenant = self._namespaces.get(match.namespace)
        miss = self.pool.why_missing(chain_key(parent_key, tokens), parent, tokens, tenant)
        return Matched(match.seq, end, miss.reason, end + miss.common, miss.evicted_ns, swapped)

    def _elsewhere(self, namespace: bytes, ids: Col, limit: int) -> int:
        """Tokens from the start that the tree has for somebody else: none, or the first block's. Only to tell why a
        prefix is not found, so only the latest namespaces are looked at; and always all of these, lest the time that it
        takes tell one tenant what another has asked."""
        others = [name for name in self._namespaces.latest(COMPARED_TENANTS) if name != namespace]
        first = min(limit, self._block_size)
        return self._block_size if sum(len(self._lookup(name, ids, first)) for name in others) else 0

    def _take_slot(self, slot: int, residency: Residency, end: int) -> None:
        self._residencies[slot] = residency
        self._open_ids[slot] = residency.open_id
        self._ends[slot] = end
        self._held[slot] = len(residency.table)
        self._known[slot] = len(residency.tokens)

    def _open(self, binding: _Binding, o: Open, now_ns: int) -> None:
        if not self._slot_is_free(binding, o.slot, o.open_id):
            return
        ids = self._known_as(o.ids, o.prompt_len)
        cached = self._lookup(o.namespace, ids, min(o.cached, len(o.ids) - 1))
        tenant = self._namespaces.take(o.namespace, o.tenant, self._held_namespaces)
        self.pool.tenants = self._namespaces.tenants
        tokens = array("i", ids.tolist())
        table = [block for _, block in cached if block != SWAPPED]
        for block in table:
            self.pool.acquire(block)
        keys = [key for key, _ in cached[: len(table) + self.pool.available]]
        self._swap_in(binding, keys, table, tokens, tenant)
        for block in table:
            self.pool.touch(block, now_ns, hit=True, keep_ns=o.keep_ns)
        end = len(table) * self._block_size
        residency = Residency(o.open_id, o.namespace, tokens, table, keys, o.keep_ns)
        self._take_slot(o.slot, residency, end)
        binding.opened.append((o.slot, o.open_id, end, list(table)))
        if end < o.cached:
            binding.rebases.append((o.slot, o.open_id, end))

    def _held_namespaces(self) -> set[int]:
        """Of which something is in the tree, or may get there."""
        cached = {index for index, blocks in enumerate(self.pool.tenant_blocks) if blocks}
        return cached | {self._namespaces[r.namespace] for r in self._residencies if r is not None}

    def _swap_in(self, binding: _Binding, keys: list[bytes], table: list[int], tokens: array[int], tenant: int) -> None:
        """Bring the blocks of `keys` behind those of `table` back from host memory, and put them into both."""
        host, size, first = self.pool.host, self._block_size, len(table)
        if host is None or first == len(keys):
            return
        sources = [host.take(key) for key in keys[first:]]  # before anything is pushed out for them
        self.pool.reserve(len(sources))
        for i, source in enumerate(sources, first):
            block = self.pool.allocate()
            parent = table[-1] if table else NO_BLOCK
            self.pool.insert(block, keys[i], parent, tokens[i * size : (i + 1) * size].tobytes(), tenant)
            table.append(block)
            if block != source:
                binding.copies.append((source, block))
        binding.allocated += len(sources)
        binding.swapped_in += len(sources)

    def _fork(self, binding: _Binding, f: Fork) -> None:
        parent = self._resident(f.parent_slot, f.parent_open_id)
        if not self._slot_is_free(binding, f.slot, f.open_id):
            return
        partial = f.n % self._block_size != 0
        if parent is None or self._ends[f.parent_slot] < f.n or self.pool.available < partial:
            binding.rebases.append((f.slot, f.open_id, REFUSED))
            return
        full = f.n // self._block_size
        table = parent.table[:full]
        for block in table:
            self.pool.acquire(block)
        if partial:
            block = self.pool.allocate()
            binding.allocated += 1
            binding.copies.append((parent.table[full], block))
            table.append(block)
        tokens = parent.tokens[: f.n]
        tokens.extend(self._known_as(f.ids, f.prompt_len - f.n).tolist())
        keys = parent.keys[:full]
        residency = Residency(f.open_id, parent.namespace, tokens, table, keys, parent.keep_ns, parent.cut)
        self._take_slot(f.slot, residency, f.n)
        binding.opened.append((f.slot, f.open_id, f.n, list(table)))

    def _slot_is_free(self, binding: _Binding, slot: int, open_id: int) -> bool:
        if 0 <= slot < len(self._residencies) and self._residencies[slot] is None:
            return True
        binding.rebases.append((slot, open_id, REFUSED))
        return False

    def _bind_items(self, binding: _Binding, plan: StepPlan) -> None:
        slots, size = plan.slot, self._block_size
        if not len(slots) or self._bind_decodes(plan):
            return
        inside = (slots >= 0) & (slots < len(self._open_ids))
        at = slots if inside.all() else np.where(inside, slots, 0)
        chunk, start, ends = plan.kind == Kind.CHUNK, plan.start_or_cap, self._ends[at]
        resident = inside & (self._open_ids[at] == plan.open_id)
        valid = resident & (plan.n > 0) & np.where(chunk, start == ends, ends >= self._known[at])
        if len(set(slots.tolist())) != len(slots):  # a slot is served once a step
            first = np.zeros(len(slots), dtype=np.bool_)
            first[np.unique(slots, return_index=True)[1]] = True
            valid &= first
        capacity = start + plan.n * chunk
        need = np.maximum(0, -(-capacity // size) - self._held[at]) * valid
        if int(need.sum()) > self.pool.available:  # serve what fits, in order
            binding.events.append(KvOverdraft(step=plan.step, need=int(need.sum()), available=self.pool.available))
            valid &= np.cumsum(need) <= self.pool.available
            need *= valid
        growing = np.flatnonzero(need)
        self.pool.reserve(int(need.sum()))
        for slot, n in zip(slots[growing].tolist(), need[growing].tolist(), strict=True):
            self._grow(binding, slot, n)
        if not valid.all():
            for i in np.flatnonzero(~valid).tolist():
                binding.skipped.append(i)
                end = int(ends[i]) if resident[i] else REFUSED
                binding.rebases.append((int(slots[i]), int(plan.open_id[i]), end))
            bound = at[valid]
            self._ends[bound] = np.maximum(ends[valid], capacity[valid])
        else:
            self._ends[at] = np.maximum(ends, capacity)
        for i in np.flatnonzero(valid & chunk).tolist():
            self.under_way.planned(plan.step, int(slots[i]), int(plan.open_id[i]), int(capacity[i]))

    def _bind_decodes(self, plan: StepPlan) -> bool:
        """The common step, whose items are all decodes that are in order and have their blocks: nothing but how far
        each is bound is written down. False if it is another one; then nothing was done."""
        slots, capacity = plan.slot, plan.start_or_cap
        if not plan.kind.all() or int(slots.min()) < 0 or int(slots.max()) >= len(self._open_ids):
            return False
        ends = self._ends[slots]
        good = self._open_ids[slots] == plan.open_id
        good &= capacity <= self._held[slots] * self._block_size
        good &= ends >= self._known[slots]
        good &= plan.n > 0
        if not good.all() or len(set(slots.tolist())) != len(slots):
            return False
        self._ends[slots] = np.maximum(ends, capacity)
        return True

    def _grow(self, binding: _Binding, slot: int, need: int) -> None:
        residency = self._residencies[slot]
        assert residency is not None  # the caller validated the item
        for _ in range(need):
            block = self.pool.allocate()
            binding.deltas.append((slot, residency.open_id, len(residency.table), block))
            residency.table.append(block)
        binding.allocated += need
        self._held[slot] += need
