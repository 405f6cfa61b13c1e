"""Plans of several rounds: when there are any, of how many, and that nothing else is changed by them."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.config.load import load
from octavo.core.config.schema import PolicyConfig
from octavo.core.messages import Deltas, Facts, Hasten, Kind, StepResult, col
from octavo.core.policy.observations import Observations
from octavo.core.scheduler.build import build
from octavo.core.scheduler.rounds import MOST_ROUNDS, Rounds
from tests.scheduler.test_scheduler_core import EOS, Scheduler

APART = 1000


def test_as_many_as_keep_tokens_coming_by_what_a_round_took() -> None:
    rounds = Rounds(APART)
    assert rounds.fit(1) == 1  # nothing was seen yet
    rounds.took(1, 1, 200)
    assert rounds.fit(1) == 5
    assert rounds.fit(2) == 2  # twice as many may take twice as long, until they were seen
    rounds.took(2, 2, 500)
    assert rounds.fit(2) == 4
    for _ in range(50):
        rounds.took(2, 1, 3000)
    assert rounds.fit(2) == 1
    rounds.took(1, 1, 1)
    assert rounds.fit(1) == MOST_ROUNDS
    nothing = Rounds(0)
    nothing.took(1, 1, 1)
    assert nothing.fit(1) == 1


@pytest.mark.parametrize(
    ("sets", "serves", "expected"),
    [
        ([], ("rounds",), 20_000_000),
        (["scheduler.tell_every_ms=0"], ("rounds",), 0),
        (["scheduler.tell_every_ms=7.5"], ("rounds",), 7_500_000),
        (["scheduler.tell_every_ms=7.5"], (), 0),
    ],
)
def test_the_executor_says_how_far_apart_unless_the_configuration_does(
    sets: list[str], serves: tuple[str, ...], expected: int
) -> None:
    facts = Facts(
        model_id="m", context=200, vocab_size=256, block_size=4, total_blocks=64, block_bytes=1, cache_seed=b"",
        serves=serves, tell_every_ms=20.0,
    )  # fmt: skip
    scheduler = build(load(sets=sets).config, facts, 1)
    assert scheduler._planner.rounds._tell_every_ns == expected


def test_decodes_are_of_several_rounds_while_nobody_waits() -> None:
    s = Scheduler(tell_every_ns=APART, depth=1, blocks=64)
    s.ask("a", max_tokens=60)
    s.run(2, round_ns=250)
    (plan,) = s.plans
    assert (plan.rounds, plan.n.tolist(), plan.start_or_cap.tolist()) == (4, [4], [8 + 2 + 3])
    s.ask("b", max_tokens=60)
    s.run(1, round_ns=250)
    (plan,) = s.plans  # only what was under way is waited for
    assert (plan.rounds, plan.kind.tolist()) == (1, [Kind.DECODE, Kind.CHUNK])
    assert s.last(Deltas).tokens.tolist() == [7] * 4


def test_who_comes_waits_for_no_round_that_is_not_begun() -> None:
    s = Scheduler(tell_every_ns=APART, depth=2, blocks=64)
    s.ask("a", max_tokens=60)
    s.run(3, round_ns=250)
    s.run(1, round_ns=250)
    first, second = s.plans
    assert (first.rounds, second.rounds) == (4, 4)
    assert s.sent(Hasten) == []
    s.ask("b", max_tokens=60)
    assert [asked.step for asked in s.sent(Hasten)] == [second.step]
    s.ask("c", max_tokens=60)
    assert len(s.sent(Hasten)) == 1  # once is enough
    s.plans.clear()
    for plan, rounds in ((first, 2), (second, 1)):  # cut short, and taken as they are
        tokens = col([7] * rounds)
        s.tell(
            StepResult(
                plan.step, plan.slot, plan.open_id, col([rounds]), tokens, plan.start_or_cap, 0, 250, rounds=rounds
            )
        )
        assert s.last(Deltas).tokens.tolist() == [7] * rounds
    while len(s.named("RequestFinished")) < 3:
        s.run(1)
    assert [one.output_tokens for one in s.named("RequestFinished")] == [60, 60, 60]


def test_a_plan_of_one_round_is_not_hastened() -> None:
    s = Scheduler(depth=2, blocks=64)
    s.ask("a", max_tokens=60)
    s.run(3, round_ns=250)
    s.ask("b", max_tokens=60)
    assert s.sent(Hasten) == []


def test_a_step_ahead_goes_on_where_the_rounds_under_way_will_end() -> None:
    s = Scheduler(tell_every_ns=APART, depth=2)
    s.ask("a", max_tokens=60)
    s.run(3, round_ns=250)
    s.run(1, round_ns=250)
    first, second = s.plans
    assert (first.rounds, second.rounds) == (4, 4)
    assert int(second.start_or_cap[0]) == int(first.start_or_cap[0]) + 4


def test_they_end_where_the_first_has_all_its_tokens() -> None:
    s = Scheduler(tell_every_ns=APART, depth=2)
    s.ask("a", max_tokens=9)
    s.ask("b", max_tokens=60)
    s.run(4, round_ns=100)
    while not s.named("RequestFinished"):
        s.run(1, round_ns=100)
    (finished,) = s.named("RequestFinished")
    assert (finished.output_tokens, finished.finish, finished.dropped) == (9, "length", 0)
    assert s.last(Deltas).n.tolist() == [s.last(Deltas).n[0]] * 2


def test_what_comes_after_an_end_is_dropped() -> None:
    s = Scheduler(tell_every_ns=APART, depth=1)
    s.ask("a", max_tokens=60)
    s.run(2, round_ns=250)
    s.run(1, token=EOS)
    (finished,) = s.named("RequestFinished")
    assert (finished.finish, finished.output_tokens, finished.dropped) == ("stop", 3, 3)


def test_who_stops_among_others_is_told_apart_from_them() -> None:
    s = Scheduler(tell_every_ns=APART, depth=1)
    for name in "abc":
        s.ask(name, max_tokens=60)
    s.run(4, round_ns=250)
    plan = s.plans.pop(0)
    assert (plan.rounds, len(plan.slot)) == (4, 3)
    tokens = col([11, 12, 13, 14, 21, EOS, 23, 24, 31, 32, 33, 34])
    s.tell(StepResult(plan.step, plan.slot, plan.open_id, col([4] * 3), tokens, col([8] * 3), 0, 1000, rounds=4))
    deltas = s.last(Deltas)
    told = np.split(deltas.tokens, np.cumsum(deltas.n)[:-1])
    assert sorted(row.tolist() for row in told) == [[11, 12, 13, 14], [21, EOS], [31, 32, 33, 34]]
    s.run(1, round_ns=250)
    assert sorted((s.last(Deltas).index - deltas.index[deltas.n == 4]).tolist()) == [4, 4]
    (finished,) = s.named("RequestFinished")
    assert (finished.finish, finished.dropped) == ("stop", 2)


def test_rounds_that_were_not_computed_took_no_time() -> None:
    s = Scheduler(tell_every_ns=APART, depth=1)
    s.ask("a", max_tokens=60)
    s.run(2, round_ns=250)
    plan = s.plans.pop(0)
    assert plan.rounds == 4
    s.tell(StepResult(plan.step, plan.slot, plan.open_id, col([1]), col([EOS]), col([8]), 0, 250, rounds=1))
    s.ask("b", max_tokens=60)
    while s.plans[0].kind.tolist() != [Kind.DECODE]:
        s.run(1)
    assert s.plans[0].rounds == 4


@pytest.mark.parametrize("blocks", [11, 12, 13, 14, 16])
def test_nobody_is_preempted_on_their_account(blocks: int) -> None:
    told = [_two_in(blocks, tell_every_ns) for tell_every_ns in (0, APART)]
    single, several = (len(s.named("RequestPreempted")) for s in told)
    assert several <= single
    assert all([one.output_tokens for one in s.named("RequestFinished")] == [20, 20] for s in told)


def _two_in(blocks: int, tell_every_ns: int) -> Scheduler:
    """Two who need 12 blocks together come to their ends."""
    s = Scheduler(tell_every_ns=tell_every_ns, depth=1, blocks=blocks)
    s.ask("a", prompt=4, max_tokens=20)
    s.ask("b", prompt=4, max_tokens=20)
    most = 0
    while s.plans:
        plan = s.plans.pop(0)
        most = max(most, plan.rounds)
        s.ack(plan, free=blocks - int(s.core._slots.blocks[s.core._slots.active].sum()))
        s.result(plan, took_ns=250 * plan.rounds)
    assert most == (4 if tell_every_ns else 1)
    return s


def test_guesses_come_in_single_steps() -> None:
    s = Scheduler(tell_every_ns=APART, depth=1, policies=PolicyConfig(speculation="fixed"))
    s.ask("a", max_tokens=60)
    s.run(3, round_ns=250)
    (plan,) = s.plans
    assert plan.rounds == 1
    assert int(plan.n[0]) > 1


def test_policies_are_told_of_a_round_and_how_many_there_were() -> None:
    s = Scheduler(tell_every_ns=APART, depth=1)
    s.ask("a", max_tokens=60)
    s.run(2, round_ns=250)
    (plan,) = s.plans
    seen = Observations()
    seen.on = True
    seen.planned(plan, np.zeros(4, dtype=np.int32))
    ends = StepResult(plan.step, plan.slot, plan.open_id, col([2]), col([7, EOS]), col([10]), 0, 500, rounds=2)
    seen.completed(plan.now_ns + 600, ends)
    seen.finished(tenant=0, prompt=8, output=4, preemptions=0, ttft_ns=1, total_ns=2)
    told = seen.take(0)
    assert told is not None
    assert (told.duration_ns.tolist(), told.rounds.tolist(), told.asked.tolist()) == ([300], [2], [0])
    assert told.tenant_output.tolist() == [2]
