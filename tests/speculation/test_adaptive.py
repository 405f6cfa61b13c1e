"""`adaptive` on an executor with a model: guesses that are wrong stop, guesses that are right go on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.core.messages import StepPlan
from octavo.core.policy.load import load_policy
from octavo.plugins.policykit.views import scene
from octavo.policies.contract import Observed
from octavo.policies.speculation.costs import Costs
from tests.speculation.conftest import CpuMaker
from tests.speculation.drafters import Oracle, Silly
from tests.speculation.replica import Replica, asked

OFF_WITHIN = 13
"""Steps with guesses of a sequence, at most, before a silly drafter is turned off; and then one in `PROBE`."""
OFF_WITHIN_DEAR = 5
"""The same where a token costs a tenth of a step."""
PROBE = 64


def drafts(plans: list[StepPlan]) -> list[int]:
    return [int(plan.n[plan.kind == 1].sum() - (plan.kind == 1).sum()) for plan in plans]


def test_a_silly_drafter_costs_time_only_and_is_turned_off(tiny: CpuMaker) -> None:
    requests = [asked(0, [5, 6, 7], tokens=150), asked(1, [5, 6, 8], tokens=150)]
    plain = Replica(tiny(), policy="off", slots=1)
    answers = plain.run(requests)
    replica = Replica(tiny(Silly), policy="adaptive", slots=1)
    assert replica.run(requests) == answers
    asked_for = drafts(replica.plans)
    assert 0 < np.count_nonzero(asked_for) <= len(requests) * OFF_WITHIN + len(asked_for) / PROBE
    assert max(asked_for[-100:]) <= 1


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.05, 0.1, 0.3, 1.0])
def test_wrong_guesses_end_soon_whatever_they_cost(cost: float) -> None:
    policy, given, asked_for = load_policy("speculation", "adaptive", {}), scene("", 0, 1), 0
    for number in range(1, PROBE - 1):
        one = np.ones(1, dtype=np.int32)
        running = replace(
            given.running, decoding=one > 0, judged=one * asked_for, right=one * 0, output_left=one * 900, prompt=one
        )
        k = int(policy.draft_lengths(replace(given.step, step=number), running)[0])
        asked_for += k > 0
        policy.observe(took([k + 1], [int(1e6 * (1 + cost * k))], right=0))
    assert 0 < asked_for <= (OFF_WITHIN if cost < 0.1 else OFF_WITHIN_DEAR)


def test_guesses_that_are_right_go_on_and_save_steps(tiny: CpuMaker) -> None:
    requests = [asked(0, [5, 6, 7], tokens=200)]
    answers = Replica(tiny(), policy="off").run(requests)
    oracle = tiny(Oracle, answers={((5, 6, 7), 0): answers[0, 0]}, wrong_in=50)
    replica = Replica(oracle, policy="adaptive")
    assert replica.run(requests) == answers
    assert len(replica.plans) < 90
    assert replica.accepted > 0.7 * replica.drafted


def took(
    tokens: list[int], times_ns: list[int], *, right: int = 1, wide: int = 1, decodes: int = 1, asked: int = 0
) -> Observed:
    """Steps of so many sequences with these tokens; all their guesses are right, or none. `wide` of them are for one
    place, and drafters were `asked` for so many or found all."""
    ints, none, times = np.ones(len(tokens), dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    drafted = np.asarray(tokens, dtype=np.int32) - decodes
    return Observed(
        1, np.asarray(times_ns, dtype=np.int64), ints * 0, ints * decodes, drafted, drafted * right, times, times, none,
        none, none, none, times, times, -(-drafted // wide), np.maximum(drafted, asked), ints,
    )  # fmt: skip


def observed(tokens: list[int], cost_ns: int) -> Observed:
    """All guesses right: a step takes 1000 ns and `cost_ns` a token."""
    return took(tokens, [1000 + cost_ns * t for t in tokens])


def test_the_measured_cost_of_a_token_decides() -> None:
    """The same guesses are made where a token is nearly free, and not where it costs more than a step."""
    step = replace(scene("", 0, 0).step, step=1)
    running = scene("", 0, 1).running
    running = replace(
        running, decoding=np.ones(1, dtype=np.bool_), output_left=np.full(1, 90, dtype=np.int32),
        judged=np.full(1, 40, dtype=np.int32), right=np.full(1, 20, dtype=np.int32),
    )  # fmt: skip
    lengths = {}
    for cost in (1, 5000):
        policy = load_policy("speculation", "adaptive", {})
        policy.observe(observed([1, 4, 9, 2, 7] * 4, cost))
        lengths[cost] = int(policy.draft_lengths(step, running)[0])
    assert lengths[1] >= 4 > 0 == lengths[5000]


def test_guesses_of_a_tree_cost_a_token_each_and_gain_a_place_together() -> None:
    """Three guesses a place, right twice in three: worth it where tokens are cheap, and no deeper than they pay; a
    chain that is right as often goes on where the tree has long stopped."""
    step, running = replace(scene("", 0, 0).step, step=1), scene("", 0, 1).running
    running = replace(
        running, decoding=np.ones(1, dtype=np.bool_), output_left=np.full(1, 90, dtype=np.int32),
        judged=np.full(1, 60, dtype=np.int32), right=np.full(1, 40, dtype=np.int32),
    )  # fmt: skip
    lengths = {}
    for wide in (1, 3):
        for cost in (0.02, 0.12, 0.3):
            policy = load_policy("speculation", "adaptive", {})
            sizes = [1, 4, 13, 7, 10] * 8
            policy.observe(took(sizes, [int(1e6 * (1 + cost * (t - 1))) for t in sizes], wide=wide))
            for _ in range(30):
                policy.observe(took([7], [int(1e6 * (1 + cost * 6))], right=0, wide=wide))
            policy.observe(took([1], [int(1e6)]))
            lengths[wide, cost] = int(policy.draft_lengths(step, running)[0])
    assert lengths[3, 0.02] % 3 == 0  # a place of a tree is guessed for as a whole
    assert lengths[3, 0.02] > lengths[3, 0.12] >= 3
    assert lengths[1, 0.3] > 0 == lengths[3, 0.3]


def test_costs_are_learnt_under_any_load() -> None:
    """The machine is up to five times as slow for a while, and single steps are ten times as long: what a step of more
    tokens takes in units of a smaller one is learnt all the same, tile for tile."""
    draw = np.random.default_rng(1)
    true = {t: 1.0 + 0.3 * (t - 1) + (0.6 if t % 4 == 3 else 0.0) for t in range(1, 18)}
    costs, sizes = Costs(0.1), [1, 4, 3, 9, 1, 1, 5, 8]
    for i in range(600):
        load = 3.0 + 2.0 * np.sin(i / 40)
        burst = 10.0 if draw.random() < 0.05 else 1.0
        costs.learn(1, sizes[i % 8] - 1, int(5e6 * true[sizes[i % 8]] * load * burst * draw.uniform(0.95, 1.05)))
    said = costs.paid(1, range(9))
    for t in sizes:
        assert abs(said[t - 1] / true[t] - 1) < 0.2, (t, said)
    assert true[4] < said[5] < true[8] * 1.2  # six were never seen


def test_at_high_load_nobody_gets_a_guess() -> None:
    policy = load_policy("speculation", "adaptive", {})
    for n, none in ((1, False), (128, True)):
        running = scene("", 0, n).running
        running = replace(
            running,
            decoding=np.ones(n, dtype=np.bool_),
            judged=np.full(n, 50, np.int32),
            right=np.full(n, 40, np.int32),
        )
        step = replace(scene("", 0, 0).step, step=64)
        assert (int(policy.draft_lengths(step, running).sum()) == 0) == none


MANY = 32


def of_many(found: int) -> list[int]:
    """Guesses asked for in each of 60 steps of 32 sequences: a step with any takes 1.1 times as long, with one for each
    1.4 times. Drafters find `found` for each step, all right."""
    policy, given, lengths = load_policy("speculation", "adaptive", {}), scene("", 0, MANY), []
    each = np.ones(MANY, dtype=np.int32)
    running = replace(given.running, decoding=each > 0, output_left=each * 900, judged=each * 0, right=each * 0)
    for number in range(1, 61):
        asked = int(policy.draft_lengths(replace(given.step, step=number), running).sum())
        made = min(asked, found)
        cost = 1.0 + (0.1 + 0.3 * made / MANY if made else 0.0)
        policy.observe(took([MANY + made], [int(3e7 * cost)], decodes=MANY, asked=asked))
        lengths.append(asked)
    return lengths


def test_what_many_guesses_cost_is_looked_at_and_then_they_are_made() -> None:
    lengths = of_many(found=MANY)
    assert lengths[:5] == [0, 0, 0, 0, MANY]
    assert np.count_nonzero(lengths[30:]) > 20


def test_where_drafters_find_little_many_are_not_asked() -> None:
    """One guess found among 32 sequences makes the step dearer than it gains."""
    assert np.count_nonzero(of_many(found=1)[10:]) <= 5


def test_one_slow_look_does_not_turn_guesses_off() -> None:
    """Guesses of the first 100 steps are wrong, and the first step that has any takes five times as long as such steps
    do; then they are right and pay."""
    policy, given = load_policy("speculation", "adaptive", {}), scene("", 0, MANY)
    each, lengths = np.ones(MANY, dtype=np.int32), list[int]()
    judged = right = 0
    for number in range(1, 301):
        if number == 100:  # other sequences
            judged = right = 0
        running = replace(
            given.running, decoding=each > 0, output_left=each * 900, judged=each * judged, right=each * right
        )
        asked = int(policy.draft_lengths(replace(given.step, step=number), running).sum())
        cost = 1.05 + 0.15 * asked / MANY if asked else 1.0
        took_ns = int(3e7 * cost * (5 if asked and not any(lengths) else 1))
        judged, right = judged + (asked > 0), right + (asked > 0 and number >= 100)
        policy.observe(took([MANY + asked], [took_ns], decodes=MANY, asked=asked, right=int(number >= 100)))
        lengths.append(asked)
    assert np.count_nonzero(lengths[200:]) > 80


@pytest.mark.parametrize("most", [2, 64])
def test_where_nothing_is_hoped_for_nobody_gets_more_than_there_is_room_for(most: int) -> None:
    policy, given = load_policy("speculation", "adaptive", {"most": most}), scene("", 0, 3)
    policy.observe(took([66] * 2000, [10**6] * 2000, right=0, decodes=2))  # hope is 0 now
    policy.observe(took([2, 6, 2, 68] * 200, [10**6] * 800, right=0, decodes=2))
    policy.observe(took([2], [10**6], decodes=2))
    running = replace(
        given.running,
        decoding=np.array([False, True, True]),
        output_left=np.array([90, 2, 90], dtype=np.int32),
        judged=np.array([0, 60, 0], dtype=np.int32),
        right=np.array([0, 60, 0], dtype=np.int32),
    )
    lengths = policy.draft_lengths(replace(given.step, step=1), running)
    assert lengths.any()
    assert (lengths <= [0, 1, most]).all()


def world(
    n: int, steps: int, right: float, step: float, more: float, *, busy: float = 0.0, seed: int = 0
) -> tuple[list[int], list[float]]:
    """`n` sequences whose every guess is right with probability `right`, and where a step with guesses takes 1 + `step`
    of one without, and for each guess `more` of it: guesses made, and tokens gained by them (those that the step's
    extra time would have yielded taken off), by step. On a `busy` machine times are spread by so much, in logarithms,
    and now and then a step takes four times as long."""
    policy, given, draw = load_policy("speculation", "adaptive", {}), scene("", 0, n), np.random.default_rng(n + seed)
    judged, hits = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
    made, gained = list[int](), list[float]()
    for number in range(1, steps + 1):
        running = replace(
            given.running,
            decoding=np.ones(n, dtype=np.bool_),
            output_left=np.full(n, 900, dtype=np.int32),
            judged=judged.copy(),
            right=hits.copy(),
        )
        lengths = policy.draft_lengths(replace(given.step, step=number), running)
        accepted = np.array([int((np.cumsum(draw.random(k) >= right) == 0).sum()) for k in lengths], dtype=np.int32)
        judged, hits = judged + np.minimum(accepted + 1, lengths), hits + accepted
        old = judged > 64
        judged, hits = np.where(old, judged // 2, judged), np.where(old, hits // 2, hits)
        drafted = int(lengths.sum())
        extra = step + more * drafted if drafted else 0.0
        load = draw.uniform(0.95, 1.05)
        if busy:
            load *= np.exp(draw.normal(0.0, busy)) * (4 if draw.random() < busy / 5 else 1)
        seen = replace(
            took([n + drafted], [int(3e7 * (1 + extra) * load)], decodes=n),
            accepted=np.array([accepted.sum()], dtype=np.int32),
        )
        policy.observe(seen)
        made.append(drafted)
        gained.append(float(accepted.sum()) - n * extra)
    return made, gained


@pytest.mark.parametrize(("n", "most"), [(1, 13), (8, 28), (32, 80)])
@pytest.mark.parametrize("right", [0.0, 0.1])
def test_guesses_that_never_pay_cost_few_tokens(n: int, most: int, right: float) -> None:
    """In 500 steps, where a guess costs as much as a token is worth or half of it."""
    for more in (1.0 / n, 0.5 / n):
        made, gained = world(n, 500, right, step=0.05, more=more)
        assert -sum(gained) < most, (made, sum(gained))


@pytest.mark.parametrize("n", [1, 4, 32])
@pytest.mark.parametrize("more", [0.0, 0.02])
def test_on_a_busy_machine_too_wrong_guesses_end_soon(n: int, more: float) -> None:
    """Times that say a step with guesses takes less than one without are noise."""
    for seed in range(8):
        made, _ = world(n, 500, 0.0, step=0.0, more=more, busy=0.3, seed=seed)
        assert 0 < np.count_nonzero(made) <= 20, (seed, made)


def test_guesses_that_yield_less_than_was_hoped_for_stop() -> None:
    """The latest guesses of all sequences were right nine times in ten, and now one in five is: at half of what a token
    is worth they do not pay, whatever is remembered of them."""
    policy, given, made = load_policy("speculation", "adaptive", {}), scene("", 0, MANY), list[int]()
    each = np.ones(MANY, dtype=np.int32)
    running = replace(given.running, decoding=each > 0, output_left=each * 2, judged=each * 60, right=each * 54)
    for number in range(1, 201):
        asked = int(policy.draft_lengths(replace(given.step, step=number), running).sum())
        seen = took([MANY + asked], [int(3e7 * (1 + 0.5 * asked / MANY))], decodes=MANY, asked=asked)
        policy.observe(replace(seen, accepted=np.array([asked // 5], dtype=np.int32)))
        made.append(asked)
    assert 0 < np.count_nonzero(made) < 40


def test_a_slow_step_before_fewer_sequences_does_not_turn_guesses_off() -> None:
    """Guesses cost half a step and yield nearly as many tokens as it. As some sequences end, the last step before takes
    three times as long: those that are left guess on."""
    policy, given, most = load_policy("speculation", "adaptive", {}), scene("", 0, MANY), list[int]()
    for number in range(1, 121):
        n = MANY if number <= 60 else 27
        each = np.ones(n, dtype=np.int32)
        running = replace(
            scene("", 0, n).running, decoding=each > 0, output_left=each * 2, judged=each * 40, right=each * 36
        )
        asked = int(policy.draft_lengths(replace(given.step, step=number), running).sum())
        slow = 3 if number == 60 else 1
        policy.observe(took([n + asked], [int(3e7 * (1 + 0.5 * asked / n) * slow)], decodes=n, asked=asked))
        most.append(asked)
    assert np.count_nonzero(most[20:60]) > 35
    assert np.count_nonzero(most[62:]) > 50


@pytest.mark.parametrize("n", [1, 8, 32])
def test_guesses_that_pay_are_found_soon(n: int) -> None:
    """Right four times in five, at a third of what a token is worth: made in most steps from the 20th on."""
    made, gained = world(n, 200, 0.8, step=0.02, more=0.3 / n)
    assert np.count_nonzero(made[20:120]) > 80
    assert sum(gained) > 0.35 * 200 * n


def test_others_are_not_made_to_wait_because_nothing_paid_for_those_before() -> None:
    policy, given = load_policy("speculation", "adaptive", {}), scene("", 0, 1)
    one = np.ones(1, dtype=np.int32)
    running = replace(given.running, decoding=one > 0, output_left=one * 900, judged=one * 60, right=one * 0)
    for number in range(1, 3):
        assert not policy.draft_lengths(replace(given.step, step=number), running).any()
        policy.observe(took([1], [10**7]))
    sure = replace(running, right=one * 60)
    assert not policy.draft_lengths(replace(given.step, step=3), sure).any()  # it is asked again later
    other = replace(sure, arrival_ns=sure.arrival_ns + 1)
    assert policy.draft_lengths(replace(given.step, step=3), other).any()


@pytest.mark.parametrize("late", [1, 8])
def test_of_steps_without_guesses_that_are_made_to_be_seen_there_is_one_at_a_time(late: int) -> None:
    """All guesses are right. Plain steps are told of together, `late` of them, or with the next that is none."""
    policy, given, lengths, told = load_policy("speculation", "adaptive", {}), scene("", 0, 1), list[int](), 0
    one = np.ones(1, dtype=np.int32)
    for number in range(1, 301):
        right = one * min(number, 60)
        running = replace(given.running, decoding=one > 0, output_left=one * 900, judged=right, right=right)
        lengths.append(int(policy.draft_lengths(replace(given.step, step=number), running)[0]))
        if lengths[-1] or number - told >= late:
            steps = lengths[told:]
            policy.observe(took([1 + k for k in steps], [int(1e7 * (1 + 0.05 * k)) for k in steps]))
            told = number
    plain = np.flatnonzero(np.array(lengths[8:]) == 0)
    assert 300 / 40 < len(plain) < 300 / 30
    assert np.diff(plain).min() > 20


@pytest.mark.parametrize("rounds", [1, 8])
def test_who_is_guessed_right_late_is_found_as_soon_where_steps_are_of_several_rounds(rounds: int) -> None:
    """All guesses are wrong up to the 1000th token, and right from there on."""
    policy, given, known, told = load_policy("speculation", "adaptive", {}), scene("", 0, 1), 0, list[int]()
    one, judged, right = np.ones(1, dtype=np.int32), 0, 0
    for number in range(1, 2000):
        running = replace(
            given.running, decoding=one > 0, output_left=one * 900, judged=one * judged, right=one * right
        )
        guesses = int(policy.draft_lengths(replace(given.step, step=number), running)[0])
        if guesses and known >= 1000:
            break
        known += 1 if guesses else rounds
        judged = min(judged + bool(guesses), 64)
        told.append(guesses)
        if guesses or len(told) == 8:
            seen = took([1 + k for k in told], [int(1e7 * (1 + 0.05 * k)) for k in told], right=0)
            policy.observe(replace(seen, rounds=np.array([1 if k else rounds for k in told], dtype=np.int32)))
            told.clear()
    assert 1000 <= known < 1000 + 64 * 8 + 8  # who was wrong often is tried every eighth time
