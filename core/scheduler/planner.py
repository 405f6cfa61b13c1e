"""Makes a StepPlan from the resident and waiting sequences: what runs in the next step.

    who decodes → is there credit, or who gives way → how the budget is divided → who is admitted

Policies propose (through the host); what is kept here whatever they say: the credit, the budget, one item a slot, the
oldest resident sequence is never preempted, and something is always planned when something can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.core.messages import Col, Fork, Kind, Open, StepPlan, col
from octavo.core.policy import PolicyHost, split_in_order
from octavo.core.scheduler.credit import Ledger
from octavo.core.scheduler.sequence import Sequence, State
from octavo.core.scheduler.slots import SlotIds, Slots
from octavo.core.scheduler.waiting import Queue
from octavo.core.trace.catalogue import Event, RequestAdmitted, RequestChunk, RequestPreempted, StepPlanned
from octavo.policies.contract import Ints, Mask, Step

MAX_DRAFTS = 64
_KINDS = col((Kind.DECODE, Kind.CHUNK))


@dataclass(slots=True)
class Commits:
    """Tokens to tell the KV-manager with the next plan, a row per residency and result."""

    slot: list[int] = field(default_factory=list)
    open_id: list[int] = field(default_factory=list)
    kv_len: list[int] = field(default_factory=list)
    n: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, slot: int, open_id: int, kv_len: int, tokens: list[int]) -> None:
        self.slot.append(slot)
        self.open_id.append(open_id)
        self.kv_len.append(kv_len)
        self.n.append(len(tokens))
        self.tokens += tokens


@dataclass(slots=True)
class Outstanding:
    """A plan whose result is not here yet. Columns have a value per item."""

    step: int
    planned_ns: int
    slot: Col
    open_id: Col
    sequences: list[Sequence]
    yields: Col
    """1 where the item samples, else 0."""
    most: Col
    """Most tokens it may yield."""


@dataclass(slots=True)
class _Draft:
    """The plan in the making."""

    step: int
    now_ns: int
    credit: int
    budget: int
    debit: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decodes: SlotIds = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    drafts: Col = field(default_factory=col)
    capacity: Col = field(default_factory=col)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def spend(self, blocks: int, tokens: int) -> None:
        self.debit += blocks
        self.credit -= blocks
        self.budget -= tokens


class Planner:
    """Plans steps over the scheduler's slots, queue and ledger; remembers only what the next plan must carry."""

    def __init__(
        self,
        slots: Slots,
        queue: Queue,
        ledger: Ledger,
        host: PolicyHost,
        *,
        chunk_budget: int,
        depth: int,
        generation: int,
    ) -> None:
        self.slots = slots
        self.queue = queue
        self.ledger = ledger
        self.commits = Commits()
        self._host = host
        self._chunk_budget = chunk_budget
        self._depth = depth
        self._generation = generation
        self._step = 0
        self._open_id = 0
        self._releases: list[tuple[int, int, int]] = []
        """(slot, open_id, blocks) to release with the next plan."""
        self.sent_back: list[Sequence] = []
        """Preempted since the core last looked: they need a new match."""

    @property
    def last_step(self) -> int:
        return self._step

    @property
    def pending(self) -> bool:
        """The next plan has something to tell even without an item."""
        return bool(self._releases)

    def release(self, slot: int) -> None:
        """The slot's sequence leaves it; the KV-manager hears of it with the next plan."""
        self._releases.append((slot, int(self.slots.open_id[slot]), int(self.slots.blocks[slot])))
        self.slots.leave(slot)

    def reset(self) -> None:
        """The KV-manager's state is new: nothing is resident, nothing needs to be told."""
        self.commits = Commits()
        self._releases = []

    def plan(self, now_ns: int, idle: bool) -> tuple[StepPlan, Outstanding, list[Event]] | None:
        """The next step, or None if there is nothing to do. `idle`: no step is under way."""
        draft = _Draft(self._step + 1, now_ns, self.ledger.credit, self._chunk_budget)
        running = self.slots.oldest_first
        step = Step(now_ns, draft.step, len(self.slots.free), draft.credit, self._chunk_budget, self.slots.block_size)
        view = self.slots.view(running)
        selection = self._host.select(step, self.queue.view(), view)
        head = self.queue.head()
        candidates = [head[i] for i in selection.admit.tolist()]
        wants = self.slots.decoding[running] & (
            self.slots.known[running] + self.slots.in_flight[running] < self.slots.limit[running]
        )
        chosen = wants if selection.decode is None else wants & selection.decode
        if idle and not chosen.any():
            chosen = wants
        decodes = running[chosen]
        drafts = self._host.draft_lengths(step, view)[chosen] if len(decodes) else col()
        gone = self._preempt(draft, step, running, wants)
        if gone:
            stays = ~np.isin(decodes, gone)
            decodes, drafts = decodes[stays], drafts[stays]
        self._plan_decodes(draft, decodes, np.minimum(drafts, MAX_DRAFTS))
        # What a preemption frees is for those it was done for: nobody is admitted in the same step.
        self._plan_prefills(draft, step, [] if gone else candidates, selection.when_blocked)
        if idle and not gone and not len(draft.decodes) and not draft.chunks:
            # No policy may leave the engine idle while somebody waits.
            self._plan_prefills(draft, step, head, "skip", forced=True)
        return self._emit(draft)

    # ── who gives way ────────────────────────────────────────────────────────────────────────────

    def _preempt(self, draft: _Draft, step: Step, running: SlotIds, wants: Mask) -> list[int]:
        """Send sequences back to waiting if the credit will not last for `depth` more steps."""
        slots = self.slots
        if len(running) < 2:
            return []
        # Most that a decode can ask for; with credit for that the exact count is not needed.
        growth = (int(slots.in_flight_most[running].max()) + self._depth) // slots.block_size + 2
        if draft.credit >= growth * len(running) and slots.decoding[running].all():
            return []
        short = self._shortage(draft, running, wants)
        if short <= 0:
            return []
        candidates = running[1:]  # the oldest always gets on
        gone: list[int] = []
        for i in self._host.victims(step, short, self.slots.view(candidates)).tolist():
            slot = int(candidates[i])
            short -= int(self.slots.blocks[slot])
            gone.append(slot)
            self._send_back(draft, slot, short)
            left = ~np.isin(running, gone)
            if short <= 0 or self._shortage(draft, running[left], wants[left]) <= 0:
                break
        return gone

    def _shortage(self, draft: _Draft, running: SlotIds, wants: Mask) -> int:
        """Blocks by which credit and releases under way fall short of what the running ones need soon."""
        slots = self.slots
        known, planned = slots.known[running], slots.planned[running]
        ahead = np.minimum(known + slots.in_flight_most[running] + self._depth, slots.limit[running])
        chunk = np.minimum(known, planned + self._chunk_budget)
        soon = np.where(slots.decoding[running], np.where(wants, ahead, 0), chunk)
        need = np.maximum(0, slots.blocks_for(soon) - slots.blocks[running])
        freed = sum(blocks for _, _, blocks in self._releases)
        return int(need.sum()) - draft.credit - self.ledger.coming - freed

    def _send_back(self, draft: _Draft, slot: int, need: int) -> None:
        sequence = self.slots.sequences[slot]
        assert sequence is not None  # the slot is active
        sequence.preemptions += 1
        draft.events.append(
            RequestPreempted(
                request_id=sequence.request.id,
                choice=sequence.choice,
                step=draft.step,
                mode="recompute",
                lost=int(self.slots.planned[slot]),
                need_blocks=need,
                credit=draft.credit,
            )
        )
        self.release(slot)
        sequence.slot = -1
        sequence.state = State.WAITING
        sequence.queued_ns = draft.now_ns
        sequence.hint = None
        self.queue.add(sequence)
        self.sent_back.append(sequence)

    # ── decodes ──────────────────────────────────────────────────────────────────────────────────

    def _plan_decodes(self, draft: _Draft, decodes: SlotIds, drafts: Ints) -> None:
        """All that fit the budget and the credit, oldest first."""
        if not len(decodes):
            return
        slots = self.slots
        known, limit = slots.known[decodes], slots.limit[decodes]
        if int(drafts.sum()) + len(drafts) > draft.budget:
            drafts = np.where(np.cumsum(drafts + 1) <= draft.budget, drafts, 0)
        capacity = np.minimum(known + slots.in_flight_most[decodes] + drafts, limit).astype(np.int32)
        need = np.maximum(0, slots.blocks_for(capacity) - slots.blocks[decodes])
        if int(need.sum()) > draft.credit or int(drafts.sum()) + len(drafts) > draft.budget:
            fits = (np.cumsum(need) <= draft.credit) & (np.cumsum(drafts + 1) <= draft.budget)
            decodes, drafts, capacity, need = decodes[fits], drafts[fits], capacity[fits], need[fits]
        slots.blocks[decodes] += need
        slots.in_flight[decodes] += 1
        slots.in_flight_most[decodes] += drafts + 1
        draft.decodes, draft.drafts, draft.capacity = decodes, drafts, capacity
        draft.decode_tokens = int(drafts.sum()) + len(drafts)
        draft.spend(int(need.sum()), draft.decode_tokens)

    # ── prefills ─────────────────────────────────────────────────────────────────────────────────

    def _plan_prefills(
        self, draft: _Draft, step: Step, candidates: list[Sequence], when_blocked: str, *, forced: bool = False
    ) -> None:
        slots = self.slots
        resident = slots.oldest_first[~slots.decoding[slots.oldest_first]]
        admissible = self._admissible(candidates, when_blocked) if draft.budget > 0 else []
        if not len(resident) and not admissible:
            return
        left = [int(slots.known[slot] - slots.planned[slot]) for slot in resident]
        left += [len(s.tokens) - self._start(s) for s in admissible]
        split = split_in_order if forced else self._host.split
        tokens = split(step, col(left), draft.decode_tokens).tolist()
        for slot, n in zip(resident.tolist(), tokens, strict=False):
            n = min(n, (int(slots.blocks[slot]) + draft.credit) * slots.block_size - int(slots.planned[slot]))
            if n > 0:
                self._chunk(draft, slot, n)
        for sequence, n in zip(admissible, tokens[len(resident) :], strict=True):
            if n > 0 and not self._admit(draft, sequence, n) and when_blocked == "stop":
                break

    def _admissible(self, candidates: list[Sequence], when_blocked: str) -> list[Sequence]:
        """Who may take a slot now, as far as slots go. A suspect runs alone."""
        if not candidates:
            return []
        running = self.slots.running
        resident = [s for s in self.slots.sequences if s is not None] if running else []
        if any(s.suspect for s in resident):
            return []
        admissible: list[Sequence] = []
        for sequence in candidates:
            if len(admissible) == len(self.slots.free):
                break
            if sequence.suspect:
                if not running and not admissible:
                    return [sequence]
                continue
            if self._ready(sequence):
                admissible.append(sequence)
            elif sequence.fork_of is None and when_blocked == "stop":
                break
        return admissible

    def _ready(self, sequence: Sequence) -> bool:
        """Its match is known; or its parent's prompt was planned in an earlier step, so that it can fork."""
        parent = sequence.fork_of
        if parent is None:
            return sequence.hint is not None
        slot = parent.slot
        return (
            slot >= 0
            and int(self.slots.planned[slot]) >= sequence.request.prompt_len
            and int(self.slots.planned_in[slot]) <= self._step
        )

    @staticmethod
    def _start(sequence: Sequence) -> int:
        """Tokens that it will not have to compute."""
        return sequence.request.prompt_len - 1 if sequence.fork_of is not None else sequence.hint or 0

    def _admit(self, draft: _Draft, sequence: Sequence, n: int) -> bool:
        """Give it a slot and its first chunk, if there is credit for its whole prompt beside what the running ones
        still need (alone, only for its chunk)."""
        slots, start = self.slots, self._start(sequence)
        parent = sequence.fork_of
        shared = start // slots.block_size if parent is not None else 0
        need = _blocks(start + n, slots.block_size) - shared
        whole = _blocks(len(sequence.tokens) + 1, slots.block_size) - shared
        if need > draft.credit or (slots.running and whole + self._promised() > draft.credit):
            return False
        self._open_id += 1
        slot = slots.take(sequence, self._open_id, start)
        request = sequence.request
        if parent is not None:
            fork = Fork(
                slot,
                self._open_id,
                parent.slot,
                parent.open_id,
                start,
                col(sequence.tokens[start:]),
                request.prompt_len,
                sequence.choice,
                request.asked.sampling,
            )
            draft.forks.append(fork)
            slots.blocks[slot] = shared
        else:
            opening = Open(
                slot,
                self._open_id,
                col(sequence.tokens),
                request.prompt_len,
                start,
                sequence.choice,
                request.asked.sampling,
                request.asked.namespace,
            )
            draft.opens.append(opening)
        self.queue.remove(sequence)
        sequence.state, sequence.slot, sequence.open_id = State.RESIDENT, slot, self._open_id
        if sequence.cached < 0:
            sequence.cached = start
        draft.events.append(
            RequestAdmitted(
                request_id=request.id,
                choice=sequence.choice,
                step=draft.step,
                slot=slot,
                open_id=self._open_id,
                how="open" if parent is None else "fork",
                cached=start,
                waited_ns=draft.now_ns - sequence.queued_ns,
            )
        )
        sequence.fork_of = None
        self._chunk(draft, slot, n)
        return True

    def _promised(self) -> int:
        """Blocks that the running ones may still ask for: the rest of their prompts, and a growth for each step
        that can be under way."""
        slots = self.slots
        active = slots.oldest_first
        ahead = np.minimum(slots.known[active] + slots.in_flight_most[active] + self._depth, slots.limit[active])
        return int(np.maximum(0, slots.blocks_for(ahead) - slots.blocks[active]).sum())

    def _chunk(self, draft: _Draft, slot: int, n: int) -> None:
        slots = self.slots
        sequence = slots.sequences[slot]
        assert sequence is not None  # resident
        start = int(slots.planned[slot])
        need = max(0, _blocks(start + n, slots.block_size) - int(slots.blocks[slot]))
        slots.blocks[slot] += need
        slots.planned[slot] = start + n
        slots.planned_in[slot] = draft.step
        if start + n == slots.known[slot]:
            slots.decoding[slot] = True
            slots.in_flight[slot] += 1
            slots.in_flight_most[slot] += 1
        draft.chunks.append((slot, start, n))
        draft.prefill_tokens += n
        draft.spend(need, n)
        draft.events.append(
            RequestChunk(request_id=sequence.request.id, choice=sequence.choice, step=draft.step, start=start, tokens=n)
        )

    # ── the plan ─────────────────────────────────────────────────────────────────────────────────

    def _emit(self, draft: _Draft) -> tuple[StepPlan, Outstanding, list[Event]] | None:
        if not len(draft.decodes) and not draft.chunks and not self._releases:
            return None
        self._step = draft.step
        slots, commits = self.slots, self.commits
        chunk_slots = np.asarray([c[0] for c in draft.chunks], dtype=np.intp)
        items = np.concatenate([draft.decodes, chunk_slots])
        chunk_ends = np.asarray([slots.planned[slot] == slots.known[slot] for slot in chunk_slots], dtype=np.int32)
        plan = StepPlan(
            scheduler_gen=self._generation,
            step=draft.step,
            now_ns=draft.now_ns,
            commit_slot=col(commits.slot),
            commit_open_id=col(commits.open_id),
            commit_kv_len=col(commits.kv_len),
            commit_n=col(commits.n),
            commit_tokens=col(commits.tokens),
            release_slot=col([r[0] for r in self._releases]),
            release_open_id=col([r[1] for r in self._releases]),
            opens=draft.opens,
            forks=draft.forks,
            slot=items.astype(np.int32),
            open_id=slots.open_id[items],
            kind=np.repeat(_KINDS, (len(draft.decodes), len(draft.chunks))),
            start_or_cap=np.concatenate([draft.capacity, col([c[1] for c in draft.chunks])]),
            n=np.concatenate([draft.drafts + 1, col([c[2] for c in draft.chunks])]).astype(np.int32),
        )
        ones = np.ones(len(draft.decodes), dtype=np.int32)
        outstanding = Outstanding(
            step=draft.step,
            planned_ns=draft.now_ns,
            slot=plan.slot,
            open_id=plan.open_id,
            sequences=[s for slot in items.tolist() if (s := slots.sequences[slot]) is not None],
            yields=np.concatenate([ones, chunk_ends]),
            most=np.concatenate([draft.drafts + 1, chunk_ends]).astype(np.int32),
        )
        self.ledger.debit(draft.step, draft.debit, sum(r[2] for r in self._releases))
        planned = StepPlanned(
            step=draft.step,
            sequences=len(items),
            prefill_tokens=draft.prefill_tokens,
            decode_tokens=draft.decode_tokens,
            opens=len(draft.opens),
            forks=len(draft.forks),
            releases=len(self._releases),
            waiting=len(self.queue),
            running=slots.running,
            credit=draft.credit,
        )
        self.commits = Commits()
        self._releases = []
        return plan, outstanding, [planned, *draft.events]


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
