"""The steps under way: planned, acked by the KV-manager, answered by the executor, or given up in a recovery.

A result, an ack or a rebase counts only for the residency (slot, open_id) that it names; of an earlier residency only
the sampled tokens count, and only while the sequence has no other.
"""

from __future__ import annotations

import numpy as np

from octavo.core.messages import ChunkLogprobs, Hasten, Role, StepAck, StepResult, TokenLogprob, col
from octavo.core.scheduler.book import Book, finish_reason
from octavo.core.scheduler.credit import Ledger
from octavo.core.scheduler.draft import Outstanding
from octavo.core.scheduler.planner import Planner
from octavo.core.scheduler.rows import INDEX, Rows, row
from octavo.core.scheduler.sequence import CLEARED_AFTER, SUSPECT_DEATHS, Request, Sequence, State
from octavo.core.scheduler.slots import SlotIds, Slots
from octavo.core.trace.catalogue import RequestFirstToken, RequestRebased, RequestRecovered, StepCompleted
from octavo.policies.contract import Mask


class Steps:
    """Plans up to `depth` steps ahead of their results, and takes what comes back."""

    def __init__(self, book: Book, slots: Slots, ledger: Ledger, planner: Planner, depth: int) -> None:
        self._book = book
        self._slots = slots
        self._ledger = ledger
        self._planner = planner
        self._depth = depth
        self._outstanding: dict[int, Outstanding] = {}
        self._computed: list[Sequence] = []
        """Whose prompts went on with the results since the last look at who waits."""
        self._several = 0
        """The last step that is of several rounds, unless the executor was asked to hasten."""

    def plan(self, now_ns: int) -> None:
        """As many steps as may be under way."""
        book, planner = self._book, self._planner
        while len(self._outstanding) < self._depth:
            if not planner.pending and not self._slots.running and not book.queue:
                return
            planned = planner.plan(now_ns, idle=not self._outstanding)
            for request in planner.refused:
                self._refuse(now_ns, request)
            planner.refused.clear()
            if planned is None:
                return
            plan, outstanding, events = planned
            self._outstanding[plan.step] = outstanding
            if plan.rounds > 1:
                self._several = plan.step
            book.outbox.send(Role.KV, plan)
            book.observations.planned(plan, self._slots.tenant)
            book.outbox.events += events
            for sequence in planner.room.sent_back:
                book.ask_match(sequence)
            planner.room.sent_back.clear()

    def hasten(self) -> None:
        """Whoever came since the last plan waits for no round that is not begun."""
        if self._several in self._outstanding and self._book.queue:
            self._book.outbox.send(Role.EXECUTOR, Hasten(self._several))
            self._several = 0

    def look_again(self) -> None:
        """What was computed just now may be what others wait to compute: those that begin alike are matched anew,
        behind the plan with which it enters the tree."""
        self._book.ask_alone()
        for leader in self._computed:
            self._book.look_again(leader, self._slots.block_size)
        self._computed.clear()

    def _refuse(self, now_ns: int, request: Request) -> None:
        left_ms = ((request.asked.deadline_ns or 0) - now_ns) / 1e6
        when = f"is {left_ms:.0f} ms away" if left_ms > 0 else f"was {-left_ms:.0f} ms ago"
        outputs = request.limit - request.prompt_len
        self._book.refuse(
            request,
            f"the deadline {when}: too soon for {request.prompt_len} prompt tokens and up to {outputs} to generate; "
            "ask for fewer tokens or allow more time",
            "deadline",
        )

    # ── acks ─────────────────────────────────────────────────────────────────────────────────────

    def ack(self, ack: StepAck) -> None:
        self._ledger.ack(ack.step, ack.free + ack.evictable)
        for slot, open_id, end in zip(
            ack.rebase_slot.tolist(), ack.rebase_open_id.tolist(), ack.rebase_end.tolist(), strict=True
        ):
            self._rebase(ack.step, slot, open_id, end)

    def _rebase(self, step: int, slot: int, open_id: int, end: int) -> None:
        """The residency is bound only up to `end`: plan on from there. What was planned for it before we knew is
        skipped by the KV-manager in the same way, and says nothing new."""
        slots = self._slots
        sequence = slots.sequences[slot]
        if sequence is None or int(slots.open_id[slot]) != open_id or step <= int(slots.rebase_fence[slot]):
            return
        self._book.outbox.events.append(
            RequestRebased(request_id=sequence.request.id, choice=sequence.choice, step=step, end=end)
        )
        if end < 0:  # a fork whose parent was not there: it goes the ordinary way
            self._book.requeue(sequence)
            return
        slots.rebase_fence[slot] = self._planner.last_step
        slots.planned[slot] = end
        slots.blocks[slot] = -(-end // slots.block_size)
        slots.decoding[slot] = slots.plain[slot] = False
        sequence.cached = min(sequence.cached, end)

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def result(self, now_ns: int, result: StepResult) -> None:
        outstanding = self._outstanding.pop(result.step, None)
        if outstanding is None:
            return  # of a step that a recovery has given up
        self._planner.taken = result.step
        if not outstanding.chunked and not len(result.drafted) and len(result.slot):
            self._planner.rounds.took(len(result.slot), result.rounds, result.finished_ns - result.started_ns)
        self._computed += outstanding.chunked
        slots, rows = self._slots, Rows()
        current = slots.open_id[outstanding.slot] == outstanding.open_id
        mine = outstanding.slot[current]
        slots.in_flight[mine] -= outstanding.yields[current]
        slots.in_flight_most[mine] -= outstanding.most[current]
        sequences = dict(zip(outstanding.open_id.tolist(), outstanding.sequences, strict=True))
        for chunk in result.prompts:
            self._take_prompt(sequences[chunk.open_id], chunk, rows)
        drafted, right = self._guesses(result, sequences, rows) if len(result.drafted) else (0, 0)
        taken = self._take_plain(result, outstanding, current, rows)
        if not taken.all():
            self._take_others(now_ns, result, sequences, np.flatnonzero((result.n_new > 0) & ~taken), rows)
        for failed in result.failed:
            sequence = sequences[failed.open_id]
            self._planner.failed.append(failed.open_id)
            if sequence.open_id == failed.open_id and sequence.state is not State.DONE:
                self._finish(now_ns, sequence, "error", failed.reason, rows)
        self._book.observations.completed(now_ns, result)
        self._book.outbox.send_rows(result.step, rows)
        self._book.outbox.events.append(
            StepCompleted(
                step=result.step,
                new_tokens=len(result.tokens),
                latency_ns=now_ns - outstanding.planned_ns,
                drafted=drafted,
                accepted=right,
            )
        )

    def _guesses(self, result: StepResult, sequences: dict[int, Sequence], told: Rows) -> tuple[int, int]:
        """Count what became of the step's drafts; guesses verified and right."""
        rows = result.drafted > 0
        slots, drafted, right = result.slot[rows], result.drafted[rows], result.n_new[rows] - 1
        depth = result.depth[rows] if len(result.depth) else drafted
        for open_id, n, good in zip(result.open_id[rows].tolist(), drafted.tolist(), right.tolist(), strict=True):
            sequence = sequences[open_id]
            sequence.drafted += n
            sequence.accepted += good
            if sequence.state is not State.DONE:
                told.guessed(sequence, n, good)
        current = self._slots.open_id[slots] == result.open_id[rows]
        self._slots.guesses.take(slots, current, drafted, depth, right)
        return int(drafted.sum()), int(right.sum())

    def _take_prompt(self, sequence: Sequence, chunk: ChunkLogprobs, rows: Rows) -> None:
        """Log-probabilities of prompt tokens. What was preempted computes some anew: only what is next counts."""
        request = sequence.request
        if sequence.state is State.DONE or not request.computes_prompt:
            return
        known = request.prompt_logprobs
        if chunk.start <= len(known) + 1:
            known += chunk.entries[len(known) + 1 - chunk.start :]
        if not request.computes_prompt:
            rows.prompt(request)

    def _take_plain(self, result: StepResult, outstanding: Outstanding, current: Mask, rows: Rows) -> Mask:
        """Take, by columns, the items with a token for each round that only have to be passed on: in a decoding step
        nearly all. Gives which they were."""
        slots, slot, n = self._slots, outstanding.slot, result.rounds
        if result.logprobs is not None or result.open_id.tobytes() != outstanding.open_id.tobytes():
            return np.zeros(len(result.n_new), dtype=np.bool_)
        plain: Mask = slots.plain[slot]
        plain &= current
        plain &= result.n_new == n
        plain &= slots.known[slot] < slots.limit[slot] - n
        starts = range(0, n * len(slot), n) if plain.all() else (np.cumsum(result.n_new) - result.n_new).tolist()
        tokens, sequences = result.tokens.tolist(), outstanding.sequences
        at, said = [], []
        for i in np.flatnonzero(plain).tolist():
            new = tokens[starts[i] : starts[i] + n]
            if sequences[i].request.stop_ids.isdisjoint(new):
                sequences[i].tokens += new
                said += new
                at.append(i)
            else:
                plain[i] = False
        if not at:
            return plain
        kv_len = result.kv_len
        if len(at) < len(slot):
            slot, kv_len, sequences = slot[at], kv_len[at], [sequences[i] for i in at]
        rows.add_alike(slots.row[:, slot], n, col(said))
        slots.row[INDEX, slot] += n
        slots.known[slot] = known = slots.known[slot] + n
        kv_len = np.minimum(kv_len, known)
        full = kv_len // slots.block_size > slots.committed[slot] // slots.block_size
        if full.any():
            for i in np.flatnonzero(full).tolist():
                self._commit(sequences[i], int(kv_len[i]))
        return plain

    def _take_others(
        self, now_ns: int, result: StepResult, sequences: dict[int, Sequence], items: SlotIds, rows: Rows
    ) -> None:
        starts = np.cumsum(result.n_new) - result.n_new
        columns = (result.open_id, result.n_new, result.kv_len, starts)
        for open_id, n, kv_len, at in zip(*(column[items].tolist() for column in columns), strict=True):
            sequence = sequences[open_id]
            if sequence.state is State.DONE or sequence.open_id != open_id:
                sequence.dropped += n
            else:
                aligned = result.logprobs[at : at + n] if result.logprobs is not None else None
                self._take(now_ns, result.step, sequence, result.tokens[at : at + n].tolist(), kv_len, aligned, rows)

    def _take(
        self,
        now_ns: int,
        step: int,
        sequence: Sequence,
        new: list[int],
        kv_len: int,
        logprobs: list[TokenLogprob | None] | None,
        rows: Rows,
    ) -> None:
        """Sampled tokens of the sequence's latest residency, which may be over already."""
        request, tokens = sequence.request, sequence.tokens
        index = len(tokens) - request.prompt_len
        finish = ""
        for kept, token in enumerate(new, 1):
            tokens.append(token)
            if token in request.stop_ids or len(tokens) >= request.limit:
                finish = finish_reason(sequence)
                sequence.dropped += len(new) - kept
                new = new[:kept]
                break
        if index == 0:
            sequence.first_ns = now_ns
            self._book.outbox.events.append(
                RequestFirstToken(
                    request_id=request.id,
                    choice=sequence.choice,
                    step=step,
                    since_queued_ns=now_ns - request.arrival_ns,
                )
            )
        if sequence.deaths and len(tokens) - sequence.died_at >= CLEARED_AFTER:
            sequence.deaths = 0
        if logprobs is not None:
            logprobs = logprobs[: len(new)]
            if request.asked.sampling.logprobs >= 0:
                sequence.logprobs += logprobs
        rows.add(sequence, index, new, logprobs)
        if sequence.slot >= 0:
            slots, slot = self._slots, sequence.slot
            slots.known[slot] = len(tokens)
            slots.row[:, slot] = row(sequence, len(tokens) - request.prompt_len, 1)
            slots.plain[slot] = not (sequence.deaths or request.orphan)
            self._commit(sequence, min(kv_len, len(tokens)))
        else:
            self._book.queue.changed(sequence)
        if finish:
            self._finish(now_ns, sequence, finish, "", rows)

    def _commit(self, sequence: Sequence, kv_len: int) -> None:
        """Tell the KV-manager new tokens, once they complete a block."""
        slots, slot, size = self._slots, sequence.slot, self._slots.block_size
        committed = int(slots.committed[slot])
        if kv_len // size > committed // size:
            self._planner.commits.add(slot, sequence.open_id, kv_len, sequence.tokens[committed:])
            slots.committed[slot] = len(sequence.tokens)

    def _finish(self, now_ns: int, sequence: Sequence, reason: str, detail: str, rows: Rows) -> None:
        self._book.finish(now_ns, sequence, reason, detail, rows)
        self._book.forget_if_done(sequence.request)

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────

    def blame(self, now_ns: int) -> None:
        """The executor died: whoever was in a step may have caused it."""
        suspects = {s for o in self._outstanding.values() for s in o.sequences if s.state is not State.DONE}
        rows = Rows()
        for sequence in sorted(suspects, key=lambda s: s.order):
            sequence.deaths += 1
            sequence.died_at = len(sequence.tokens)
            if sequence.deaths > SUSPECT_DEATHS:
                why = f"the executor died {sequence.deaths} times while computing this request, the last time alone"
                self._finish(now_ns, sequence, "error", f"poison: {why}", rows)
        self._book.outbox.send_rows(0, rows)

    def recover(self, now_ns: int) -> None:
        """The KV is lost: every resident sequence waits to be computed again, and nothing under way counts."""
        self._outstanding.clear()
        self._computed.clear()
        self._book.observations.lost()
        self._book.can_match = False
        for slot in np.flatnonzero(self._slots.active).tolist():
            sequence = self._slots.sequences[slot]
            assert sequence is not None  # the slot is active
            self._slots.leave(slot)
            sequence.state, sequence.slot, sequence.open_id = State.WAITING, -1, -1
            sequence.hint = None
            sequence.queued_ns = now_ns
            self._book.queue.add(sequence)
            self._book.outbox.events.append(
                RequestRecovered(request_id=sequence.request.id, choice=sequence.choice, deaths=sequence.deaths)
            )
        self._planner.reset()
