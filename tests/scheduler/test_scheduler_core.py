"""The scheduler alone: what it plans, whom it refuses, and what it does when somebody is lost."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from octavo.core.config.schema import PolicyConfig
from octavo.core.machine import Outputs
from octavo.core.messages import (
    EMPTY,
    Cancel,
    Deltas,
    Enqueue,
    Failed,
    Kind,
    KvState,
    Match,
    Matched,
    PeerDown,
    PeerUp,
    Refused,
    Role,
    Sampling,
    StepAck,
    StepPlan,
    StepResult,
    Stop,
    Tick,
    col,
)
from octavo.core.policy import PolicyHost, load_policies
from octavo.core.scheduler.core import SchedulerCore
from octavo.core.scheduler.intake import ORPHAN_NS

M = TypeVar("M")
PLAIN = PolicyConfig()
EOS = 2


class Scheduler:
    """A scheduler with blocks of four tokens, and stand-ins for its peers that answer when told to."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        depth: int = 2,
        slots: int = 4,
        budget: int = 16,
        policies: PolicyConfig = PLAIN,
        **more: Any,
    ) -> None:
        self.core = SchedulerCore(
            host=PolicyHost(load_policies(policies)),
            generation=1,
            slots=slots,
            block_size=4,
            total_blocks=blocks,
            context=200,
            chunk_budget=budget,
            depth=depth,
            **more,
        )
        self.blocks = blocks
        self.now = 0
        self.plans: list[StepPlan] = []
        self.answers: list[Any] = []
        self.events: list[Any] = []
        self.cached = 0
        self.lengths: dict[int, int] = {}
        self.tell(KvState(blocks, blocks, 0))
        self.tell(PeerUp(Role.EXECUTOR, 1))

    def tell(self, message: Any) -> Outputs:
        self.now += 1
        outputs = self.core.apply(self.now, message)
        self.events += outputs.events
        for out in outputs.messages:
            if isinstance(out.message, StepPlan):
                self.plans.append(out.message)
            elif isinstance(out.message, Match):
                self.tell(Matched(out.message.seq, self.cached))
            else:
                self.answers.append(out.message)
        return outputs

    def sent(self, kind: type[Any]) -> list[Any]:
        """What it sent of a kind, but for plans."""
        return [answer for answer in self.answers if isinstance(answer, kind)]

    def ask(self, name: str = "a", prompt: int = 8, max_tokens: int | None = 4, **more: Any) -> None:
        fields: dict[str, Any] = {
            "handle": hash(name) & 0xFFFF, "request_id": name, "attempt": 0, "ids": col(range(100, 100 + prompt)),
            "n": 1, "sampling": Sampling(), "max_tokens": max_tokens, "stop_ids": [EOS], "tenant": "", "priority": 0,
            "deadline_ns": None, "namespace": b"", "received_ns": 0, "trace_id": "", "delivered": [], "finished": [],
        }  # fmt: skip
        self.tell(Enqueue(**{**fields, **more}))

    def ack(self, plan: StepPlan, free: int | None = None, rebases: list[tuple[int, int, int]] = []) -> None:  # noqa: B006
        columns = [col([r[i] for r in rebases]) for i in range(3)]
        self.tell(StepAck(plan.step, self.blocks if free is None else free, 0, *columns))

    def result(self, plan: StepPlan, token: int = 7, took_ns: int = 0) -> None:
        """Every item that samples yields this token, in each round."""
        for o in plan.opens:
            self.lengths[o.open_id] = len(o.ids)
        samples = [
            kind == Kind.DECODE or start + n >= self.lengths.get(open_id, 0)
            for open_id, kind, start, n in zip(plan.open_id, plan.kind, plan.start_or_cap, plan.n, strict=True)
        ]
        n_new = plan.rounds * col(samples)
        kv_len = col([8] * len(plan.slot))
        tokens = col([token] * int(n_new.sum()))
        told = plan.step, plan.slot, plan.open_id, n_new, tokens, kv_len, 0, took_ns
        self.tell(StepResult(*told, rounds=plan.rounds))

    def run(self, steps: int, token: int = 7, round_ns: int = 0) -> None:
        for _ in range(steps):
            plan = self.plans.pop(0)
            self.ack(plan)
            self.result(plan, token, round_ns * plan.rounds)

    def last(self, kind: type[M]) -> M:
        return [a for a in self.answers if isinstance(a, kind)][-1]

    def named(self, event: str) -> list[Any]:
        return [e for e in self.events if type(e).__name__ == event]


def test_steps_are_planned_ahead_of_their_results() -> None:
    s = Scheduler(depth=2)
    s.ask()
    first, second = s.plans
    assert first.kind.tolist() == [Kind.CHUNK]
    assert second.kind.tolist() == [Kind.DECODE]
    assert second.start_or_cap.tolist() == [9]  # the token of the first step is counted before it is known


def test_decodes_and_chunks_share_a_step_within_the_budget() -> None:
    s = Scheduler(budget=6, depth=1)
    s.ask("a", prompt=4)
    s.run(1)
    s.ask("b", prompt=20)
    s.run(1)
    plan = s.plans[0]
    assert sorted(zip(plan.kind.tolist(), plan.n.tolist(), strict=True)) == [(Kind.CHUNK, 5), (Kind.DECODE, 1)]


def test_a_debit_counts_matched_blocks_until_it_is_acked() -> None:
    s = Scheduler()
    s.cached = 8
    s.ask(prompt=12)
    assert s.core._ledger.credit == 64 - 4  # three of the prompt, one for the decode behind it
    s.ack(s.plans[0], free=61)
    assert s.core._ledger.credit == 61 - 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "code", "numbers"),
    [
        (200, None, "prompt", "context_length_exceeded", "200"),
        (100, 101, "max_tokens", "context_length_exceeded", "101"),
        (100, 50, "max_tokens", "never_fits", "128"),
        (150, 1, "prompt", "never_fits", "150"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(
    prompt: int, max_tokens: int | None, field: str, code: str, numbers: str
) -> None:
    s = Scheduler(blocks=32)
    s.ask(prompt=prompt, max_tokens=max_tokens)
    refused = s.last(Refused)
    assert (refused.field, refused.code) == (field, code)
    assert numbers in refused.reason
    assert not s.plans


def test_too_many_waiting_is_overload() -> None:
    s = Scheduler(max_waiting=2, slots=1)
    for name in "abcd":
        s.ask(name)
    assert s.last(Refused).code == "overloaded"


def test_a_choice_ends_at_its_end_token_and_later_tokens_are_dropped() -> None:
    s = Scheduler(depth=2)
    s.ask(max_tokens=10)
    plan, ahead = s.plans.pop(0), s.plans.pop(0)
    s.ack(plan)
    s.result(plan, EOS)
    assert [(e.reason, e.choice) for e in s.last(Deltas).ends] == [("stop", 0)]
    deltas = sum(isinstance(a, Deltas) for a in s.answers)
    s.ack(ahead)
    s.result(ahead)
    assert sum(isinstance(a, Deltas) for a in s.answers) == deltas
    assert s.core.stats["requests"] == 0


def test_a_cancel_works_in_every_state() -> None:
    s = Scheduler(slots=1, depth=1)
    s.ask("running", prompt=30)
    s.ask("waiting")
    s.tell(Cancel("waiting"))
    s.tell(Cancel("running"))
    s.tell(Cancel("nobody"))
    assert s.core.stats["requests"] == s.core.stats["running"] == s.core.stats["waiting"] == 0
    s.run(1)
    assert s.plans[0].release_slot.tolist() == [0]


def test_other_choices_fork_once_the_prompt_is_computed() -> None:
    s = Scheduler(depth=2)
    s.ask(n=3, prompt=9)
    first, second = s.plans
    assert [len(p.opens) for p in (first, second)] == [1, 0]
    assert not second.forks, "the first choice's chunk may still fail"
    s.result(first)
    third = s.plans[-1]
    assert [f.n for f in third.forks] == [8, 8]
    assert [f.choice for f in third.forks] == [1, 2]


def test_choices_whose_prompt_failed_in_another_compute_it_themselves() -> None:
    s = Scheduler(depth=2)
    s.ask(n=2, prompt=9)
    first, second = s.plans
    failed = [Failed(int(first.slot[0]), int(first.open_id[0]), "logits are not finite")]
    for plan in (first, second):
        s.tell(StepResult(plan.step, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, started_ns=0, finished_ns=0, failed=failed))
    third, fourth = s.plans[2:]
    assert third.failed == fourth.failed == [1]
    assert not third.forks + fourth.forks
    assert [(o.choice, len(o.ids)) for o in third.opens + fourth.opens] == [(1, 9)]


def test_a_refused_fork_goes_the_ordinary_way() -> None:
    s = Scheduler(depth=2)
    s.ask(n=2, prompt=9)
    first, second = s.plans
    s.result(first)
    third = s.plans[-1]
    (fork,) = third.forks
    s.plans.clear()
    s.ack(first)
    s.ack(third, rebases=[(fork.slot, fork.open_id, -1)])
    s.result(second)
    (plan,) = s.plans
    assert [o.choice for o in plan.opens] == [1]
    assert plan.release_slot.tolist() == [fork.slot]


def test_a_rebase_is_followed_once_and_replanned_from_there() -> None:
    s = Scheduler(depth=2, budget=64)
    s.cached = 8
    s.ask(prompt=12)
    first, second = s.plans
    (o,) = first.opens
    s.plans.clear()
    s.ack(first, rebases=[(o.slot, o.open_id, 4)])
    none = StepResult(1, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, started_ns=0, finished_ns=0)
    s.tell(none)
    assert s.plans[0].start_or_cap.tolist() == [4]
    s.ack(second, rebases=[(o.slot, o.open_id, 4)])  # the decode that was planned before we knew
    assert int(s.core._slots.planned[o.slot]) == 12


def test_the_youngest_gives_way_and_the_oldest_never_does() -> None:
    s = Scheduler(blocks=8, depth=1, budget=32)
    s.ask("old", prompt=8, max_tokens=20)
    s.ask("young", prompt=8, max_tokens=20)
    while not s.named("RequestPreempted"):
        plan = s.plans.pop(0)
        s.ack(plan, free=8 - int(s.core._slots.blocks[s.core._slots.active].sum()))
        s.result(plan)
    assert {e.request_id for e in s.named("RequestPreempted")} == {"young"}


def test_a_draft_is_given_up_rather_than_waiting_for_a_block() -> None:
    s = Scheduler(depth=1, policies=PolicyConfig(speculation="fixed"))
    s.ask(prompt=7, max_tokens=10)
    first = s.plans.pop(0)
    s.ack(first, free=0)
    s.result(first)
    (plan,) = s.plans
    assert (plan.n.tolist(), plan.start_or_cap.tolist()) == ([1], [8])  # two full blocks, and no third one


def test_a_draft_goes_as_far_as_its_blocks_where_there_are_no_more() -> None:
    s = Scheduler(depth=1, policies=PolicyConfig(speculation="fixed", options={"speculation": {"tokens": 9}}))
    s.ask(prompt=5, max_tokens=20)
    first = s.plans.pop(0)
    s.ack(first, free=0)
    s.result(first)
    (plan,) = s.plans
    assert (plan.n.tolist(), plan.start_or_cap.tolist()) == ([3], [8])  # its own token, and two guesses


def test_nobodys_prompt_waits_for_a_guess() -> None:
    s = Scheduler(
        depth=1, budget=16, policies=PolicyConfig(speculation="fixed", options={"speculation": {"tokens": 4}})
    )
    s.ask("decoding", prompt=8, max_tokens=30)
    s.run(1)
    s.ask("arriving", prompt=27, max_tokens=4)
    s.run(1)  # planned before it came
    assert (s.plans[0].kind.tolist(), s.plans[0].n.tolist()) == ([Kind.DECODE, Kind.CHUNK], [1, 15])
    s.run(1)
    assert (s.plans[0].kind.tolist(), s.plans[0].n.tolist()) == ([Kind.DECODE, Kind.CHUNK], [1 + 3, 12])
    assert int(s.named("StepPlanned")[-1].decode_tokens) == 4


def test_a_stop_string_ends_a_choice_at_its_index() -> None:
    s = Scheduler(depth=1)
    s.ask(max_tokens=50)
    s.run(5)
    s.tell(Stop("a", 0, 2))
    (finished,) = s.named("RequestFinished")
    assert (finished.finish, finished.output_tokens, finished.dropped) == ("stop", 3, 2)


def test_a_row_that_the_executor_could_not_compute_fails_alone() -> None:
    s = Scheduler(depth=1)
    s.tell(PeerDown(Role.KV))
    s.ask("bad")
    s.ask("good")
    s.tell(KvState(64, 64, 0))
    s.run(1)
    plan = s.plans.pop(0)
    bad = Failed(int(plan.slot[0]), int(plan.open_id[0]), "logits are not finite")
    s.tell(
        StepResult(
            plan.step, plan.slot[1:], plan.open_id[1:], col([1]), col([7]), col([8]), started_ns=0, finished_ns=0,
            failed=[bad],
        )
    )  # fmt: skip
    assert [(e.reason, e.detail) for e in s.last(Deltas).ends] == [("error", "logits are not finite")]
    assert s.core.stats["requests"] == 1


def test_lost_kv_is_computed_again_from_what_is_known() -> None:
    s = Scheduler(depth=1)
    s.ask(prompt=8, max_tokens=10)
    s.run(3)
    s.plans.clear()
    s.tell(PeerDown(Role.KV))
    assert s.core.stats["running"] == 0
    assert not s.plans
    s.tell(KvState(64, 64, 0))
    (o,) = s.plans[0].opens
    assert len(o.ids) == 8 + 3


def test_a_suspect_runs_alone_and_is_given_up_when_the_executor_dies_again() -> None:
    s = Scheduler(depth=1)

    def crash() -> None:
        s.plans.clear()
        s.tell(PeerDown(Role.EXECUTOR))
        s.tell(PeerUp(Role.EXECUTOR, 2))
        s.tell(KvState(64, 64, 0))

    s.ask("poison")
    crash()
    crash()
    s.ask("innocent")
    assert len(s.plans[0].opens) == 1
    assert s.core.stats["running"] == 1
    crash()
    (end,) = s.last(Deltas).ends
    assert end.reason == "error"
    assert "poison" in end.detail
    assert s.core.stats["running"] == 1  # the innocent one's turn


def test_a_resume_continues_what_is_there_and_repeats_what_was_missed() -> None:
    s = Scheduler(depth=1)
    s.ask(max_tokens=10)
    s.run(4)
    s.tell(PeerDown(Role.TOKENIZER))
    s.run(1)
    s.tell(PeerUp(Role.TOKENIZER, 2))
    s.ask(max_tokens=10, attempt=1, handle=99, delivered=[[7, 7]], finished=[False])
    deltas = s.last(Deltas)
    assert (deltas.handle.tolist(), deltas.attempt.tolist(), deltas.index.tolist()) == ([99], [1], [2])
    assert deltas.tokens.tolist() == [7, 7, 7]
    assert s.core.stats["requests"] == 1


def test_an_earlier_attempt_that_comes_late_is_fenced() -> None:
    s = Scheduler(depth=1)
    s.ask(max_tokens=10, attempt=2, handle=22)
    s.ask(max_tokens=10, attempt=1, handle=11)
    s.ask(max_tokens=10, attempt=2, handle=33)
    s.run(1)
    assert s.last(Deltas).handle.tolist() == [22]
    assert s.core.stats["requests"] == 1


def test_a_new_scheduler_continues_from_the_clients_journal() -> None:
    s = Scheduler(depth=1)
    s.ask(n=2, prompt=8, max_tokens=5, attempt=3, delivered=[[7, 7], [7] * 5], finished=[False, False])
    assert [(e.choice, e.reason) for e in s.last(Deltas).ends] == [(1, "length")]
    (o,) = s.plans[0].opens
    assert (len(o.ids), o.prompt_len) == (10, 8)


def test_requests_whose_client_does_not_come_back_are_cancelled() -> None:
    s = Scheduler(depth=1)
    s.ask("lost", max_tokens=100)
    s.tell(PeerDown(Role.TOKENIZER))
    outputs = s.tell(PeerUp(Role.TOKENIZER, 2))
    assert outputs.wakeup_ns == s.now + ORPHAN_NS
    s.ask("new")
    s.now += ORPHAN_NS
    s.tell(Tick())
    assert [(e.request_id, e.finish) for e in s.named("RequestFinished")] == [("lost", "cancelled")]
    assert s.core.stats["requests"] == 1


def test_whose_a_prefix_is_and_how_long_to_keep_it_goes_with_its_opening() -> None:
    s = Scheduler()
    s.ask(tenant="ada", keep_ns=7)
    (o,) = s.plans[0].opens
    assert (o.tenant, o.keep_ns) == ("ada", 7)
