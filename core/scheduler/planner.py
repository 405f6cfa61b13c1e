"""Makes a StepPlan from the resident and waiting sequences: what runs in the next step.

    who decodes → is there credit, or who gives way → how the budget is divided → who is admitted → what is guessed,
    or of how many rounds it is

Policies propose (through the host); what is kept here whatever they say: the credit, the budget, one item a slot, the
oldest resident sequence is never sent back for want of blocks and nobody too often for a batching policy's sake, nobody
waits for ever, and something is always planned when something can be (a policy may rest, but not for long).
"""

from __future__ import annotations

import numpy as np

from octavo.core.messages import EMPTY, Kind, StepPlan, col, cols
from octavo.core.policy import PolicyHost, split_in_order
from octavo.core.policy.rules import AGEING_NS, MAX_HOLD_NS, MAX_LEFT_OUT
from octavo.core.scheduler.admission import Admission
from octavo.core.scheduler.credit import Ledger
from octavo.core.scheduler.draft import Commits, Draft, Outstanding, blocks_for
from octavo.core.scheduler.room import Room
from octavo.core.scheduler.rounds import Rounds
from octavo.core.scheduler.sequence import Request, Sequence, State
from octavo.core.scheduler.slots import SlotIds, Slots
from octavo.core.scheduler.tenants import Tenants
from octavo.core.scheduler.waiting import Queue
from octavo.core.trace.catalogue import (
    Event,
    RequestChunk,
    StepPlanned,
)
from octavo.policies.contract import MAX_DRAFTS, Ints, Mask, Selection, Step

_KINDS = col((Kind.DECODE, Kind.CHUNK))


class Planner:
    """Plans steps over the scheduler's slots, queue and ledger; remembers only what the next plan must carry."""

    def __init__(
        self,
        slots: Slots,
        queue: Queue,
        ledger: Ledger,
        host: PolicyHost,
        tenants: Tenants,
        *,
        chunk_budget: int,
        depth: int,
        swaps: bool,
        rounds: Rounds,
        generation: int,
    ) -> None:
        self.slots = slots
        self.queue = queue
        self.ledger = ledger
        self.commits = Commits()
        self.taken = 0
        """The last step whose result is here."""
        self.failed: list[int] = []
        """Residencies that have failed since the last plan."""
        self.room = Room(slots, queue, ledger, host, chunk_budget=chunk_budget, depth=depth, swaps=swaps)
        self.rounds = rounds
        self._admission = Admission(slots, queue, self.room)
        self._host = host
        self._tenants = tenants
        self._chunk_budget = chunk_budget
        self._generation = generation
        self._step = 0
        self.refused: list[Request] = []
        """Refused by the batching policy since the core last looked."""
        self.wake_ns: int | None = None
        """Until when the batching policy lets the engine rest, unless something happens before."""
        self._resting_ns: int | None = None
        """Since when it does."""
        self.overruled = 0
        """How often something was planned that no policy asked for, because nothing would have moved."""
        self._aged_ns = 0
        """When the kernel last said whose turn it is."""

    @property
    def last_step(self) -> int:
        return self._step

    @property
    def pending(self) -> bool:
        """The next plan has something to tell even without an item."""
        return bool(self.room.releases)

    def reset(self) -> None:
        """The KV-manager's state is new: nothing is resident, nothing needs to be told."""
        self.commits = Commits()
        self.failed = []
        self.room.releases = []

    def plan(self, now_ns: int, idle: bool) -> tuple[StepPlan, Outstanding, list[Event]] | None:
        """The next step, or None if there is nothing to do. `idle`: no step is under way."""
        draft = Draft(self._step + 1, now_ns, self.ledger.credit, self._chunk_budget, self.taken)
        running = self.slots.oldest_first
        step = Step(
            now_ns,
            draft.step,
            len(self.slots.free),
            draft.credit,
            self._chunk_budget,
            self.slots.block_size,
            self._tenants.names,
            (self._generation << 40) + draft.step,
        )
        view = self.slots.view(running)
        selection = self._host.select(step, self.queue.view(), view)
        head = self.queue.head()
        candidates = [head[i] for i in selection.admit.tolist()]
        if selection.refuse is not None and (refused := self._refuse([head[i] for i in selection.refuse.tolist()])):
            head = [s for s in head if s.request not in refused]
            candidates = [s for s in candidates if s.request not in refused]
        wants = self.slots.decoding[running] & (
            self.slots.known[running] + self.slots.in_flight[running] < self.slots.limit[running]
        )
        chosen = wants if selection.decode is None else self._chosen(running, wants, selection.decode)
        if idle and chosen is not wants and not chosen.any() and wants.any():
            chosen = wants
            self.overruled += 1
        at = np.flatnonzero(chosen)
        gone = self.room.preempt(draft, step, running, wants)
        if not gone and selection.preempt is not None and candidates and self._admission.ready(draft, candidates[0]):
            gone = self.room.make(draft, running[selection.preempt], candidates[0])
        if gone:
            at = at[~np.isin(running[at], gone)]
        at = at[self._plan_decodes(draft, running[at])]
        # What a preemption frees is for those it was done for: nobody is admitted in the same step.
        overdue = None if gone else self._overdue(draft, head)
        if overdue is not None:
            others = [s for s in candidates if s is not overdue]
            self._plan_prefills(draft, step, [overdue, *others], "stop", forced=True)
            if overdue.state is State.RESIDENT:
                self._aged_ns = now_ns
                self.overruled += 1
        else:
            self._plan_prefills(draft, step, [] if gone else candidates, selection.when_blocked)
        if idle and not gone and not len(draft.decodes) and not draft.chunks:
            # No policy may leave the engine idle for long while somebody waits.
            self.wake_ns = self._rest_until(now_ns, selection) if head and not len(running) else None
            if self.wake_ns is None:
                self._plan_prefills(draft, step, head, "skip", forced=True)
                self.overruled += bool(draft.chunks) and selection.wake_ns is None
        if len(at) and draft.budget > 0:
            self._plan_guesses(draft, self._host.draft_lengths(step, view)[at])
        if len(draft.decodes) == len(running) > 0 and not draft.chunks and not self.queue:
            self._plan_rounds(draft)
        planned = self._emit(draft)
        if planned is not None:
            planned[2].extend(self._admission.blocked(draft, "preemption" if gone else "policy"))
        return planned

    # ── what becomes of a batching policy's intent ───────────────────────────────────────────────

    def _refuse(self, sequences: list[Sequence]) -> list[Request]:
        """Whom the policy may refuse: who has a deadline, and of whom nobody has seen anything yet."""
        requests = list(dict.fromkeys(s.request for s in sequences if s.request.asked.deadline_ns is not None))
        refused = [r for r in requests if all(s.state is State.WAITING and not s.outputs for s in r.sequences)]
        self.refused += refused
        return refused

    def _chosen(self, running: SlotIds, wants: Mask, asked: Mask) -> Mask:
        """Who decodes, if the policy says who: nobody is left out for long."""
        left_out = self.slots.left_out[running]
        overdue = left_out >= MAX_LEFT_OUT
        self.overruled += bool(overdue.any())
        chosen: Mask = wants & (asked | overdue)
        self.slots.left_out[running] = np.where(wants & ~chosen, left_out + 1, 0)
        return chosen

    def _overdue(self, draft: Draft, head: list[Sequence]) -> Sequence | None:
        """Who arrived first, if it has waited so long that it goes before all others. One at a time: when everybody
        waits long the policy still decides about nearly all."""
        if not head or not self.slots.free or draft.now_ns - max(self._aged_ns, head[0].queued_ns) < AGEING_NS:
            return None
        return head[0] if self._admission.ready(draft, head[0]) else None

    def _rest_until(self, now_ns: int, selection: Selection) -> int | None:
        """Until when nothing is done although somebody waits, if the policy asks for that and it is not too long."""
        if selection.wake_ns is None:
            return None
        if self._resting_ns is None:
            self._resting_ns = now_ns
        until = min(selection.wake_ns, self._resting_ns + MAX_HOLD_NS)
        return until if now_ns < until else None

    # ── decodes ──────────────────────────────────────────────────────────────────────────────────

    def _plan_decodes(self, draft: Draft, decodes: SlotIds) -> Mask:
        """A token of all that fit the budget and the credit, oldest first; says which those are."""
        slots = self.slots
        sure = slots.known[decodes] + slots.in_flight_most[decodes]
        capacity = np.minimum(sure, slots.limit[decodes])
        need = np.maximum(slots.blocks_for(capacity) - slots.blocks[decodes], 0)
        fits: Mask = (need == 0) | (np.cumsum(need) <= draft.credit)
        fits[draft.budget :] = False
        if not fits.all():
            decodes, capacity, need = decodes[fits], capacity[fits], need[fits]
        blocks, tokens = int(need.sum()), len(decodes)
        if blocks:
            slots.blocks[decodes] += need
        slots.in_flight[decodes] += 1
        slots.in_flight_most[decodes] += 1
        draft.decodes, draft.most, draft.capacity = decodes, np.ones(tokens, dtype=np.int32), capacity
        draft.decode_tokens = tokens
        draft.spend(blocks, tokens)
        return fits

    def _plan_guesses(self, draft: Draft, guesses: Ints) -> None:
        """Further tokens of those that decode, from the budget and the credit that are left: nobody's prompt waits for
        a guess, and no guess for a block."""
        slots, decodes = self.slots, draft.decodes
        guesses = np.minimum(guesses, MAX_DRAFTS)
        if int(guesses.sum()) > draft.budget:
            guesses = np.clip(draft.budget - np.cumsum(guesses) + guesses, 0, guesses)
        if not guesses.any():
            return
        held, limit = slots.blocks[decodes], slots.limit[decodes]
        need = np.maximum(slots.blocks_for(np.minimum(draft.capacity + guesses, limit)) - held, 0)
        if int(need.sum()) > draft.credit:
            guesses = np.clip(held * slots.block_size - draft.capacity, 0, guesses)
            need = np.zeros_like(need)
        self._go_further(draft, guesses, np.minimum(draft.capacity + guesses, limit), need)
        draft.spend(int(need.sum()), int(guesses.sum()))

    def _plan_rounds(self, draft: Draft) -> None:
        """Let a step of decodes without guesses be of several rounds, when nobody waits for its end: up to where the
        first of them has all its tokens, and only while there is credit for a block more of each, so that nobody is
        preempted on their account. The budget is each round's."""
        rounds = self.rounds.fit(len(draft.decodes))
        if rounds == 1 or int(draft.most.max()) > 1:
            return
        slots, decodes = self.slots, draft.decodes
        left = slots.limit[decodes] - slots.known[decodes] - slots.in_flight_most[decodes]
        rounds = min(rounds, 1 + int(left.min()))
        if rounds <= 1:
            return
        capacity = draft.capacity + (rounds - 1)
        need = np.maximum(slots.blocks_for(capacity) - slots.blocks[decodes], 0)
        blocks = int(need.sum())
        if blocks + len(decodes) > draft.credit:
            return
        self._go_further(draft, np.full_like(draft.most, rounds - 1), capacity, need)
        slots.in_flight[decodes] += rounds - 1
        draft.rounds = rounds
        draft.spend(blocks, 0)

    def _go_further(self, draft: Draft, more: Ints, capacity: Ints, need: Ints) -> None:
        """Each decode may yield so many tokens more, up to this capacity, for which it needs so many more blocks."""
        slots, decodes = self.slots, draft.decodes
        slots.blocks[decodes] += need
        slots.in_flight_most[decodes] += more
        draft.most, draft.capacity = draft.most + more, capacity
        draft.decode_tokens += int(more.sum())

    # ── prefills ─────────────────────────────────────────────────────────────────────────────────

    def _plan_prefills(
        self, draft: Draft, step: Step, candidates: list[Sequence], when_blocked: str, *, forced: bool = False
    ) -> None:
        slots = self.slots
        resident = slots.oldest_first[~slots.decoding[slots.oldest_first]]
        admissible = self._admission.admissible(draft, candidates, when_blocked) if draft.budget > 0 else []
        if candidates and draft.budget <= 0:
            draft.refused[candidates[0]] = ("budget", self._admission.left(candidates[0]), 0)
        if not len(resident) and not admissible:
            return
        left = [int(slots.known[slot] - slots.planned[slot]) for slot in resident]
        left += [self._admission.left(s) for s in admissible]
        if len(resident) and draft.step - int(slots.planned_in[resident].min()) > MAX_LEFT_OUT:
            forced = True
            self.overruled += 1
        split = split_in_order if forced else self._host.split
        tokens = split(step, col(left), draft.decode_tokens).tolist()
        for slot, n in zip(resident.tolist(), tokens, strict=False):
            n = min(n, (int(slots.blocks[slot]) + draft.credit) * slots.block_size - int(slots.planned[slot]))
            if n > 0:
                self._chunk(draft, slot, n)
        for sequence, n in zip(admissible, tokens[len(resident) :], strict=True):
            if n <= 0:
                if not draft.refused:  # those after it wait behind it
                    draft.refused[sequence] = ("budget", self._admission.left(sequence), draft.budget)
            elif self._admission.admit(draft, sequence, n):
                self._chunk(draft, sequence.slot, n)
            elif when_blocked == "stop":
                break

    def _chunk(self, draft: Draft, slot: int, n: int) -> None:
        slots = self.slots
        sequence = slots.sequences[slot]
        assert sequence is not None  # resident
        start = int(slots.planned[slot])
        need = max(0, blocks_for(start + n, slots.block_size) - int(slots.blocks[slot]))
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

    def _emit(self, draft: Draft) -> tuple[StepPlan, Outstanding, list[Event]] | None:
        if not len(draft.decodes) and not draft.chunks and not self.room.releases:
            return None
        self._step = draft.step
        self._resting_ns = None
        slots, commits = self.slots, self.commits
        items, start_or_cap, n = draft.decodes, draft.capacity, draft.most
        kind = yields = np.ones(len(items), dtype=np.int32)
        most = n
        if draft.rounds > 1:
            yields = most
        if draft.chunks:
            at, start, tokens = cols(draft.chunks, 3)
            samples = slots.planned[at] == slots.known[at]
            items, start_or_cap = np.concatenate([items, at]), np.concatenate([start_or_cap, start])
            kind = np.repeat(_KINDS, (len(n), len(at)))
            yields, most = np.concatenate([yields, samples]), np.concatenate([n, samples])
            n = np.concatenate([n, tokens])
        releases = self.room.releases
        release_slot, release_open_id, release_blocks = cols(releases, 3)
        commit_slot, commit_open_id, commit_kv_len, commit_n = cols(commits.rows, 4)
        plan = StepPlan(
            scheduler_gen=self._generation,
            step=draft.step,
            now_ns=draft.now_ns,
            commit_slot=commit_slot,
            commit_open_id=commit_open_id,
            commit_kv_len=commit_kv_len,
            commit_n=commit_n,
            commit_tokens=col(commits.tokens) if commits.tokens else EMPTY,
            release_slot=release_slot,
            release_open_id=release_open_id,
            opens=draft.opens,
            forks=draft.forks,
            slot=items.astype(np.int32),
            open_id=slots.open_id[items],
            kind=kind,
            start_or_cap=start_or_cap,
            n=n,
            taken=self.taken,
            failed=self.failed,
            needs_ack=bool(draft.debit or releases) or self._host.observing,
            rounds=draft.rounds,
        )
        outstanding = Outstanding(
            step=draft.step,
            planned_ns=draft.now_ns,
            slot=plan.slot,
            open_id=plan.open_id,
            sequences=[s for slot in items.tolist() if (s := slots.sequences[slot]) is not None],
            yields=yields,
            most=most,
            chunked=[s for slot, _, _ in draft.chunks if (s := slots.sequences[slot]) is not None],
        )
        self.ledger.debit(draft.step, draft.debit, int(release_blocks.sum()) if releases else 0)
        planned = StepPlanned(
            step=draft.step,
            sequences=len(items),
            prefill_tokens=draft.prefill_tokens,
            decode_tokens=draft.decode_tokens,
            opens=len(draft.opens),
            forks=len(draft.forks),
            releases=len(releases),
            waiting=len(self.queue),
            running=slots.running,
            credit=draft.credit,
            policy_ns=self._host.take_spent_ns(),
            open_ids=plan.open_id.tolist(),
            rounds=draft.rounds,
        )
        self.commits = Commits()
        self.failed = []
        self.room.releases = []
        return plan, outstanding, [planned, *draft.events]
