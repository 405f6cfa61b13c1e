"""The scheduler's pure core: which requests exist, their tokens, order, slots and credit. It never knows a block id.

A message comes in, its part of the state changes, then as many steps are planned as may be under way:

    intake ──▶ book ◀──▶ steps ──▶ planner ──▶ StepPlan
    (asked)   (who is    (under     (who runs in the next one)
               where)     way)
"""

from __future__ import annotations

from octavo.core.machine import Outputs
from octavo.core.messages import (
    Body,
    Cancel,
    Enqueue,
    KvState,
    Matched,
    PeerDown,
    PeerUp,
    Role,
    StepAck,
    StepResult,
    Stop,
    SwapPolicy,
    Tick,
    Weigh,
)
from octavo.core.policy import PolicyHost
from octavo.core.scheduler.book import Book, Outbox
from octavo.core.scheduler.credit import Ledger
from octavo.core.scheduler.intake import Intake
from octavo.core.scheduler.planner import Planner
from octavo.core.scheduler.rounds import Rounds
from octavo.core.scheduler.slots import Slots
from octavo.core.scheduler.steps import Steps
from octavo.core.scheduler.tenants import Tenants
from octavo.core.scheduler.waiting import Queue


class SchedulerCore:
    """One replica's scheduler. `context` is the longest sequence the model takes, in tokens; the KV pool has
    `total_blocks` of `block_size` tokens. `tell_every_ns` is how far apart tokens may be told where the
    executor computes several rounds of a plan."""

    def __init__(
        self,
        *,
        host: PolicyHost,
        generation: int,
        slots: int,
        block_size: int,
        total_blocks: int,
        context: int,
        chunk_budget: int,
        depth: int,
        swaps: bool = False,
        tell_every_ns: int = 0,
        waiting_window: int = 256,
        max_waiting: int = 4096,
    ) -> None:
        self._host = host
        self._slots = Slots(slots, block_size)
        self._ledger = Ledger()
        tenants = Tenants()
        queue = Queue(waiting_window)
        self._planner = Planner(
            self._slots,
            queue,
            self._ledger,
            host,
            tenants,
            chunk_budget=chunk_budget,
            depth=depth,
            swaps=swaps,
            rounds=Rounds(tell_every_ns),
            generation=generation,
        )
        self._book = Book(queue, self._planner.room)
        self._steps = Steps(self._book, self._slots, self._ledger, self._planner, depth)
        self._intake = Intake(
            self._book,
            tenants,
            context=context,
            block_size=block_size,
            total_blocks=total_blocks,
            max_waiting=max_waiting,
        )
        self._kv_ready = False
        self._executor_up = False

    @property
    def stats(self) -> dict[str, int]:
        """For status and health."""
        return {
            "running": self._slots.running,
            "waiting": len(self._book.queue),
            "requests": len(self._book.requests),
            "blocks_total": self._ledger.total,
            "blocks_available": self._ledger.available,
            "step": self._planner.last_step,
            "preemptions": self._planner.room.preemptions,
            **self._slots.guesses.stats,
            "policy_overruled": self._planner.overruled,
            **self._host.stats,
        }

    def apply(self, now_ns: int, message: Body) -> Outputs:
        outbox = self._book.outbox = Outbox()
        match message:
            case StepResult():
                self._steps.result(now_ns, message)
            case StepAck():
                self._steps.ack(message)
                self._tell_policies(now_ns)
            case Enqueue():
                self._intake.enqueue(now_ns, message)
            case Matched():
                self._book.matched(message)
            case Stop():
                self._intake.stop(now_ns, message)
            case Cancel():
                self._intake.cancel(now_ns, message.request_id)
            case KvState():
                self._ledger.reset(message.total, message.free + message.evictable)
                self._kv_ready = True
                self._book.ask_all_matches()
            case PeerUp():
                self._on_peer_up(now_ns, message)
            case PeerDown():
                self._on_peer_down(now_ns, message)
            case SwapPolicy():
                self._host.swap(message.group, message.name, message.options, message.disabled)
            case Weigh():
                self._host.weigh(message.weights)
            case Tick():
                pass
            case _:
                raise TypeError(f"the scheduler takes no {type(message).__name__}")
        self._intake.expire_orphans(now_ns)
        self._planner.wake_ns = None
        if self._kv_ready and self._executor_up:
            self._steps.plan(now_ns)
            self._steps.hasten()
            self._steps.look_again()
        outbox.events += self._host.drain_events()
        wakeups = [at for at in (self._intake.orphans_at, self._planner.wake_ns) if at is not None]
        return Outputs(outbox.messages, outbox.events, min(wakeups, default=None))

    def _tell_policies(self, now_ns: int) -> None:
        """With an ack, since then the step's work is with others and nobody waits for us."""
        self._book.observations.on = self._host.observing
        if self._host.observing and (observed := self._book.observations.take(now_ns)) is not None:
            self._host.observe(observed)

    def _on_peer_up(self, now_ns: int, peer: PeerUp) -> None:
        if peer.role is Role.EXECUTOR:
            self._executor_up = True
        elif peer.role is Role.TOKENIZER:
            self._intake.tokenizer_back(now_ns)

    def _on_peer_down(self, now_ns: int, peer: PeerDown) -> None:
        if peer.role is Role.TOKENIZER:
            self._intake.tokenizer_lost()
        elif peer.role in (Role.KV, Role.EXECUTOR):
            self._kv_ready = self._book.can_match = False
            if peer.role is Role.EXECUTOR:
                self._executor_up = False
                self._steps.blame(now_ns)
            self._steps.recover(now_ns)
