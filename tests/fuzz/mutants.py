"""Single-line faults in the production cores, each of which the fuzzer must catch.

A fault is (file, line, replacement): the line must occur exactly once, so that a change of the code that makes a
fault meaningless is noticed.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    line: str
    fault: str


# ruff: noqa: E501 - a line of the code is quoted whole

POOL, KV, HOST, UNDER_WAY = "core/kv/pool.py", "core/kv/core.py", "core/kv/host.py", "core/kv/under_way.py"
LEDGER, PLANNER, STEPS = "core/scheduler/credit.py", "core/scheduler/planner.py", "core/scheduler/steps.py"
BOOK, INTAKE = "core/scheduler/book.py", "core/scheduler/intake.py"
ADMISSION, RESIDENTS, TOKENIZER = "core/scheduler/admission.py", "executors/residents.py", "core/tokenizer/core.py"

MUTANTS = [
    Mutant("an open skips its references", KV, "            self.pool.acquire(block)\n        keys =", "            pass\n        keys ="),
    Mutant("a fork skips its references", KV, "        for block in table:\n            self.pool.acquire(block)\n        if partial:", "        if partial:"),
    Mutant("a fork does not copy the tail", KV, "            binding.copies.append((parent.table[full], block))", "            pass"),
    Mutant("a fork shares the tail block", KV, "        table = parent.table[:full]", "        table = parent.table[: full + 1]"),
    Mutant("a fork trusts a rebased parent", KV, "if parent is None or self._ends[f.parent_slot] < f.n or", "if parent is None or"),
    Mutant("a release keeps the blocks", KV, "        for block in residency.table:\n            self.pool.release(block)", "        pass"),
    Mutant("a commit claims a token too many", KV, "self._insert(binding, slot, residency, kv_len, plan.now_ns)", "self._insert(binding, slot, residency, kv_len + 1, plan.now_ns)"),
    Mutant("a duplicate is not re-pointed on the executor", KV, "                binding.deltas.append((slot, residency.open_id, i, canonical))", "                pass"),
    Mutant("a re-pointed duplicate takes no reference", KV, "                self.pool.acquire(canonical)\n", ""),
    Mutant("deltas of a released slot go out", KV, "if self._open_ids[d[0]] == d[1]]", "]"),
    Mutant("a chunk may start anywhere", KV, "np.where(chunk, start == ends, ends >= self._known[at])", "np.where(chunk, True, ends >= self._known[at])"),
    Mutant("a decode may overtake its prefill", KV, "np.where(chunk, start == ends, ends >= self._known[at])", "np.where(chunk, start == ends, True)"),
    Mutant("decodes alone need no blocks", KV, "        good &= capacity <= self._held[slots] * self._block_size\n", ""),
    Mutant("an open may cover the whole prompt of another length", KV, "cached = self._lookup(o.namespace, ids, min(o.cached, len(o.ids) - 1))", "cached = self._lookup(o.namespace, ids, len(o.ids) - 1)"),
    Mutant("a prompt finds what was generated", KV, "        ids = self._known_as(o.ids, o.prompt_len)\n", "        ids = o.ids\n"),
    Mutant("what is generated is a prompt's", KV, "self._known_as(plan.commit_tokens, 0)", "plan.commit_tokens"),
    Mutant("a chunk is shared before its result", UNDER_WAY, "if chunk.step <= taken and", "if chunk.step <= taken + 1 and"),
    Mutant("a chunk that failed is shared", UNDER_WAY, "taken and chunk.open_id not in failed:", "taken:"),
    Mutant("what was under way at a release and failed is confirmed", UNDER_WAY, "            elif held.open_id in lost or not pool", "            elif not pool"),
    Mutant("a fork shares a prompt whose result is not there", ADMISSION, "<= draft.taken", "< draft.step"),
    Mutant("a key forgets its prefix", POOL, "return sha256(parent + block_tokens)", "return sha256(block_tokens)"),
    Mutant("eviction takes what is in use", POOL, "np.flatnonzero(self._unreferenced & (self._children == 0))", "np.flatnonzero(self._children == 0)"),
    Mutant("eviction takes inner nodes", POOL, "np.flatnonzero(self._unreferenced & (self._children == 0))", "np.flatnonzero(self._unreferenced)"),
    Mutant("a node does not count its children", POOL, "            self._children[parent] += 1", "            pass"),
    Mutant("an acquired block stays evictable", POOL, "            self.evictable -= 1\n            self._unreferenced[block] = False\n        self._refs", "            self._unreferenced[block] = False\n        self._refs"),
    Mutant("a freed block with a key is free and cached", POOL, "            if self._key[block] is None:\n                self._free", "            if True:\n                self._free"),
    Mutant("a block is swapped out again and again", HOST, "        self._out.clear()\n", ""),
    Mutant("what leaves host memory stays its tenant's", HOST, "        del self._of[tenant][key]\n", ""),
    Mutant("what was computed again stays in host memory", POOL, "            self.host.discard(key)", "            pass"),
    Mutant("what is swapped in is not copied", KV, "                binding.copies.append((source, block))", "                pass"),
    Mutant("what is swapped in pushes itself out", KV, "        sources = [host.take(key) for key in keys[first:]]  # before anything is pushed out for them\n        self.pool.reserve(len(sources))", "        self.pool.reserve(len(keys) - first)\n        sources = [host.take(key) for key in keys[first:]]"),
    Mutant("a flush frees what is in use", POOL, "            if self._refs[block]:\n                in_use += 1\n            else:", "            if False:\n                in_use += 1\n            else:"),
    Mutant("a flush takes a parent before its children", POOL, "            if self._children[block]:\n                continue\n            self._unlink", "            self._unlink"),
    Mutant("a flush begins at the root", POOL, "return found[::-1]", "return found"),
    Mutant("a sequence goes on where its blocks were flushed", KV, "if not self._caching or residency.cut:", "if not self._caching:"),
    Mutant("a fork of a cut sequence is whole", KV, "parent.keep_ns, parent.cut)", "parent.keep_ns)"),
    Mutant("credit ignores debits under way", LEDGER, "return self._available - self._debits", "return self._available"),
    Mutant("credit counts releases under way", LEDGER, "return self._available - self._debits", "return self._available - self._debits + self._coming"),
    Mutant("an ack keeps its debit", LEDGER, "        self._debits -= blocks", "        pass"),
    Mutant("capacity ignores steps in flight", PLANNER, "sure = slots.known[decodes] + slots.in_flight_most[decodes]", "sure = slots.known[decodes]"),
    Mutant("a growing sequence is not debited", PLANNER, "        draft.spend(blocks, tokens)\n        return fits", "        draft.spend(0, tokens)\n        return fits"),
    Mutant("blocks of further rounds are not debited", PLANNER, "        draft.spend(blocks, 0)", "        pass"),
    Mutant("tokens in flight do not count to the limit", PLANNER, "self.slots.known[running] + self.slots.in_flight[running] < self.slots.limit[running]", "self.slots.known[running] <= self.slots.limit[running]"),
    Mutant("a result of an earlier residency counts", STEPS, "if sequence.state is State.DONE or sequence.open_id != open_id:", "if sequence.state is State.DONE:"),
    Mutant("a rebase of an earlier residency counts", STEPS, "if sequence is None or int(slots.open_id[slot]) != open_id or step", "if sequence is None or step"),
    Mutant("a rebase is forgotten", STEPS, "        slots.planned[slot] = end", "        pass"),
    Mutant("a recovery forgets what was under way", STEPS, "        self._outstanding.clear()", "        pass"),
    Mutant("a resume does not repeat what was missed", INTAKE, "                rows.add(sequence, have, missing, sequence.logprobs_from(have))", "                pass"),
    Mutant("a resume does not say what has ended", INTAKE, '                rows.end(sequence, sequence.finish, "", now_ns)', "                pass"),
    Mutant("a forked child waits for a parent that ended", BOOK, "                    self._alone.append(other)", "                    pass"),
    Mutant("a preempted sequence is not matched again", STEPS, "            for sequence in planner.room.sent_back:\n                book.ask_match(sequence)", "            pass"),
    Mutant("a finished sequence keeps its slot", BOOK, "            self._room.release(sequence.slot)\n            sequence.slot = -1", "            sequence.slot = -1"),
    Mutant("columns of a slot keep what was there before", RESIDENTS, "self._tables[slot, :n], self._tables[slot, n:] = bind.opened_blocks[at : at + n], 0", "self._tables[slot, :n] = bind.opened_blocks[at : at + n]"),
    Mutant("columns are not told of new blocks", RESIDENTS, "            self._tables[slots, indices] = blocks\n", ""),
    Mutant("a fork forgets its parent's adapter", RESIDENTS, "namespace, adapter = parent.namespace, parent.adapter", "namespace, adapter = parent.namespace, None"),
    Mutant("adapters share the prefix tree", TOKENIZER, 'digest = b"" if adapter is None else adapter.digest', 'digest = b""'),
    Mutant("an open forgets its adapter", ADMISSION, "                request.asked.adapter,\n", ""),
    Mutant("commits come a token late and go astray", STEPS, "sequence.tokens[committed:])", "sequence.tokens[committed + 1 :])"),
]  # fmt: skip
