"""What policies do for those they are for, in the small engine: production cores, virtual clock, exact outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np
import pytest

from octavo.core.config.schema import PolicyConfig
from octavo.core.messages import SwapPolicy, Weigh
from octavo.core.policy import Policies, load_policies
from octavo.core.policy.load import load_policy
from octavo.core.policy.rules import MAX_HOLD_NS, MAX_SENT_BACK
from octavo.core.trace.catalogue import PolicyRejected, PolicySwapped, RequestAdmitted, RequestPreempted
from octavo.plugins.policykit.engine import Asked, Engine, burst
from octavo.plugins.policykit.views import scene, some_leaves
from octavo.policies.contract import Ints, Observed, Running, Selection, Step, Waiting

S = 1_000_000_000


def chosen(**names: str | tuple[str, dict[str, Any]]) -> Policies:
    """The default policies but for these: a name, or a name and options."""
    made = {}
    for group, name in names.items():
        one = (name, {}) if isinstance(name, str) else name
        made[group] = load_policy(group, *one)
    return replace(load_policies(PolicyConfig()), **made)


def run(asked: list[Asked], policies: Policies, **more: Any) -> Engine:
    engine = Engine(policies, **more)
    engine.run(asked)
    assert all(one.refused or (one.done_ns is not None and len(one.tokens) == one.output) for one in asked)
    assert not [event for event in engine.events if isinstance(event, PolicyRejected)]
    return engine


def ttft_s(asked: list[Asked], which: Callable[[Asked], bool] = lambda one: True) -> list[float]:
    return [((one.first_ns or 0) - one.at_ns) / S for one in asked if which(one)]


def total_s(one: Asked) -> float:
    return ((one.done_ns or 0) - one.at_ns) / S


# ── batching ─────────────────────────────────────────────────────────────────────────────────────


def tokens_of(make: Callable[[], list[Asked]], policies: Policies, **more: Any) -> list[list[int]]:
    asked = make()
    run(asked, policies, **more)
    return [one.tokens for one in asked]


@pytest.mark.parametrize(
    "names",
    [
        {"batching": "priority", "preemption": "priority"},
        {"batching": ("fair", {"takeover": True})},
        {"batching": "shortest", "chunking": "fair-share", "preemption": "cheapest"},
        {"batching": "dynamic", "chunking": "slo", "eviction": "slru"},
        {"speculation": ("fixed", {"tokens": 3})},
        {"speculation": "adaptive"},
    ],
    ids=str,
)
def test_no_policy_changes_an_answer(names: dict[str, Any]) -> None:
    assert tokens_of(burst, chosen(**names), blocks=50) == tokens_of(burst, chosen(), blocks=400)


def low_then_high() -> list[Asked]:
    return [*[Asked(0, 12, 60) for _ in range(4)], Asked(2 * S, 12, 5, priority=1)]


def test_an_urgent_request_takes_a_slot_and_the_others_still_get_their_answers() -> None:
    alone = tokens_of(low_then_high, chosen())
    asked = low_then_high()
    engine = run(asked, chosen(batching="priority"))
    assert [one.tokens for one in asked] == alone
    assert sum(isinstance(event, RequestPreempted) for event in engine.events) == 1
    in_order = low_then_high()
    run(in_order, chosen())
    assert total_s(asked[4]) < 0.5 * total_s(in_order[4])


class TakesAlways:
    """Everybody who waits takes the slot of whoever runs."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        everyone = np.arange(len(waiting), dtype=np.int32)
        return Selection(everyone[::-1], preempt=np.arange(len(running), dtype=np.int32))


def test_slots_do_not_go_round_for_ever() -> None:
    asked = [Asked(0, 12, 20) for _ in range(6)]
    engine = run(asked, replace(chosen(), batching=TakesAlways()), slots=2)
    taken = [event.request_id for event in engine.events if isinstance(event, RequestPreempted)]
    assert len(taken) > 6
    assert max(taken.count(request_id) for request_id in set(taken)) <= MAX_SENT_BACK


def test_who_cannot_make_its_deadline_is_told_so_at_once() -> None:
    seen = [Asked(0, 40, 10) for _ in range(3)]
    hopeless = Asked(3 * S, 40, 100, within_ns=S)
    possible = Asked(3 * S, 40, 5, within_ns=2 * S)
    asked = [*seen, hopeless, possible]
    run(asked, chosen(batching="deadline"))
    assert (hopeless.refused, possible.refused) == ("deadline", "")
    assert total_s(possible) < 2


def test_more_deadlines_are_met_than_in_order_of_arrival() -> None:
    def ask() -> list[Asked]:
        patient = [Asked(0, 60, 40, within_ns=60 * S) for _ in range(12)]
        return [*patient, *[Asked(S // 10 + i * S // 4, 12, 8, within_ns=4 * S) for i in range(12)]]

    def met(policies: Policies) -> int:
        asked = ask()
        run(asked, policies)
        return sum(not one.refused and total_s(one) * S <= (one.within_ns or 0) for one in asked)

    assert met(chosen(batching="deadline")) >= met(chosen()) + 6


def test_a_short_chat_does_not_wait_behind_another_tenants_fifty_jobs() -> None:
    def chats() -> list[Asked]:
        return [Asked(S + i * S, 12, 8, "chat") for i in range(20)]

    def worst(jobs: list[Asked], policies: Policies) -> float:
        asked = [*jobs, *chats()]
        run(asked, policies)
        return float(np.quantile([total_s(one) for one in asked if one.tenant == "chat"], 0.99))

    def jobs() -> list[Asked]:
        return [Asked(0, 200, 60, "jobs") for _ in range(50)]

    alone = worst([], chosen())
    assert worst(jobs(), chosen(batching=("fair", {"takeover": True}))) <= 2 * alone
    assert worst(jobs(), chosen()) > 10 * alone


def test_tenants_get_service_by_their_weights() -> None:
    asked = [Asked(0, 24, 24, tenant) for _ in range(60) for tenant in ("ada", "bob")]
    run(asked, chosen(batching=("fair", {"weights": {"ada": 3.0}})))
    half = sorted(one.done_ns or 0 for one in asked)[60]
    done = [sum((one.done_ns or 0) <= half for one in asked if one.tenant == t) for t in ("ada", "bob")]
    assert 2.4 < done[0] / done[1] < 3.6


def test_the_shortest_first_halves_the_mean_wait_of_a_mix() -> None:
    def ask() -> list[Asked]:
        return [Asked(0, 20, 60 if i % 3 == 0 else 5) for i in range(30)]

    def wait(policies: Policies) -> float:
        asked = ask()
        run(asked, policies)
        return mean(ttft_s(asked))

    assert wait(chosen(batching="shortest")) < 0.6 * wait(chosen())


def admissions(engine: Engine) -> list[int]:
    """Per step with admissions, how many there were."""
    steps = [event.step for event in engine.events if isinstance(event, RequestAdmitted)]
    return [steps.count(step) for step in dict.fromkeys(steps)]


def test_static_waits_for_its_number_and_lets_nobody_join() -> None:
    asked = [Asked(i * S // 10, 8, 10) for i in range(12)]
    run(asked, chosen(batching=("static", {"size": 4})), slots=4)
    batches = [asked[:4], asked[4:8], asked[8:]]
    assert min(one.first_ns or 0 for one in batches[0]) > asked[3].at_ns
    for batch, following in pairwise(batches):
        assert max(one.done_ns or 0 for one in batch) < min(one.first_ns or 0 for one in following)


def test_nobody_waits_for_a_batch_longer_than_the_kernel_allows() -> None:
    asked = [Asked(S, 8, 4)]
    run(asked, chosen(batching=("static", {"size": 4})))
    assert MAX_HOLD_NS / S < total_s(asked[0]) < MAX_HOLD_NS / S + 1


def test_dynamic_waits_no_longer_than_its_delay() -> None:
    asked = [Asked(S, 8, 4), Asked(S + S // 10, 8, 4)]
    engine = run(asked, chosen(batching=("dynamic", {"size": 4, "delay_ms": 500.0})))
    assert admissions(engine) == [2]
    assert 0.5 <= ttft_s(asked)[0] < 0.7


# ── chunking ─────────────────────────────────────────────────────────────────────────────────────


def test_slo_keeps_the_time_between_tokens_that_a_fixed_budget_breaks() -> None:
    def too_long(policies: Policies) -> int:
        engine = Engine(policies, budget=512, token_ns=1_000_000)
        engine.run([Asked(0, 12, 120), *[Asked(2 * S + i * S // 2, 400, 4) for i in range(8)]])
        return int((np.diff(engine.result_ns) > 130_000_000).sum())

    assert too_long(chosen(chunking=("slo", {"itl_ms": 120.0}))) <= 2  # until it has learnt what a token costs
    assert too_long(chosen()) >= 8


def test_a_short_prompt_is_not_held_up_by_a_long_one_beside_it() -> None:
    def wait(policies: Policies) -> float:
        asked = [Asked(0, 1500, 4), Asked(S // 10, 12, 4)]
        run(asked, policies)
        return ttft_s(asked)[1]

    assert wait(chosen(chunking="fair-share")) < 0.5 * wait(chosen())


def test_whole_cuts_no_prompt_that_fits() -> None:
    whole = load_policy("chunking", "whole", {})
    step = replace(scene("", 0, 0).step, chunk_budget=100)
    assert whole.split(step, np.asarray([60, 50, 10], dtype=np.int32), 0).tolist() == [60, 0, 0]
    assert whole.split(step, np.asarray([300, 50], dtype=np.int32), 20).tolist() == [80, 0]


# ── eviction ─────────────────────────────────────────────────────────────────────────────────────


def evicted(name: str, need: int, options: dict[str, Any] | None = None, **columns: Any) -> set[int]:
    leaves = replace(some_leaves(50, equal=True), last_used=np.arange(50, dtype=np.int64), **columns)
    policy = load_policy("eviction", name, options or {})
    return set(np.argsort(policy.rank(need, leaves), kind="stable")[:need].tolist())


def test_a_scan_does_not_wash_out_what_is_found_again() -> None:
    hits = np.where(np.arange(50) < 10, 3, 0).astype(np.int32)  # the oldest ten were found before, the rest is a scan
    assert evicted("lru", 10, hits=hits) == set(range(10))
    for name in ("slru", "lfu", "cost-aware"):
        assert evicted(name, 10, hits=hits) == set(range(10, 20)), name


def test_a_deep_block_is_worth_more_to_cost_aware() -> None:
    depth = np.where(np.arange(50) < 10, 500, 0).astype(np.int32)
    assert evicted("cost-aware", 10, depth=depth) == set(range(10, 20))


def test_a_tenant_loses_its_excess_before_another_loses_anything() -> None:
    tenant = np.where(np.arange(50) < 10, 0, 1).astype(np.int32)
    held = np.asarray([10, 40], dtype=np.int32)
    assert evicted("lru", 10, tenant=tenant, held=held) == set(range(10))
    assert evicted("tenant-quota", 10, tenant=tenant, held=held) == set(range(10, 20))
    assert evicted("tenant-quota", 20, tenant=tenant, held=held) == {*range(10, 25), *range(5)}


def test_shares_of_the_cache_follow_the_weights() -> None:
    tenant = np.where(np.arange(50) < 30, 0, 1).astype(np.int32)
    held = np.asarray([30, 20], dtype=np.int32)
    assert evicted("tenant-quota", 5, tenant=tenant, held=held) == set(range(5))
    weights = {"ada": 4.0}  # ada may have 40 of the 50, bob 10
    assert evicted("tenant-quota", 5, {"weights": weights}, tenant=tenant, held=held) == set(range(30, 35))


def test_tenants_weights_are_said_once_for_all_policies_that_have_them() -> None:
    both = PolicyConfig(batching="fair", eviction="tenant-quota", weights={"ada": 3.0})
    made = load_policies(both)
    tenant = np.where(np.arange(50) < 30, 0, 1).astype(np.int32)
    leaves = replace(some_leaves(50, equal=True), tenant=tenant, held=np.asarray([30, 20], dtype=np.int32))
    assert set(np.argsort(made.eviction.rank(7, leaves), kind="stable")[:7].tolist()) == set(range(30, 37))

    def shares(policies: Policies, *, swapped: bool = False) -> float:
        """Slots that ada gets, of those that both want."""
        asked = [Asked(0, 12, 20, ("ada", "bob")[i % 2]) for i in range(120)]
        engine = Engine(policies, slots=4, weights=both.weights)
        if swapped:
            engine.tell(0, SwapPolicy("batching", "fair", {}))
        engine.run(asked)
        first = sorted((one for one in asked), key=lambda one: one.done_ns or 0)[:60]
        return sum(one.tenant == "ada" for one in first) / 60

    assert shares(made) >= 0.65
    assert shares(chosen(), swapped=True) >= 0.65
    assert 0.4 <= shares(chosen(batching="fair")) <= 0.6
    assert shares(load_policies(PolicyConfig(batching="fair", weights={"ada": 3.0},
                                             options={"batching": {"weights": {"bob": 3.0}}}))) <= 0.35  # fmt: skip


# ── learning, swapping ───────────────────────────────────────────────────────────────────────────


class Told:
    """No guesses but in the 30th step; keeps what it is told."""

    def __init__(self) -> None:
        self.pieces: list[Observed] = []

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        return np.full(len(running), step.step == 30, dtype=np.int32)

    def observe(self, observed: Observed) -> None:
        self.pieces.append(observed)


def test_steps_are_told_once_and_those_that_are_alike_together() -> None:
    told, asked = Told(), [Asked(0, 4, 2, "first"), Asked(S, 40, 50, "ada"), Asked(S, 30, 60, "bob")]
    run(asked, replace(chosen(), speculation=told))
    for tenant, prompt, output in ((1, 40, 50), (2, 30, 60)):
        mine = [piece for piece in told.pieces if len(piece.tenant_output) > tenant]
        assert sum(int(piece.tenant_prefill[tenant]) for piece in mine) == prompt
        assert sum(int(piece.tenant_output[tenant]) for piece in mine) == output
    assert sum(len(piece.output) for piece in told.pieces) == 3
    for piece in told.pieces:
        notable = [bool(i) for i in (piece.prefill_tokens + piece.asked).tolist()]
        assert len(notable) <= 8
        assert not any(notable[:-1])  # told at once, with those before
    assert max(len(piece.duration_ns) for piece in told.pieces) == 8
    assert sum(sum(piece.asked.tolist()) for piece in told.pieces) == 2


def test_adaptive_speculation_follows_what_is_right() -> None:
    engine = Engine(chosen(speculation="adaptive"))
    engine.run([Asked(0, 12, 200)])
    adaptive = load_policy("speculation", "adaptive", {})
    running = scene("", 0, 2).running
    step = replace(scene("", 0, 0).step, step=1)
    wide = int(adaptive.draft_lengths(step, running).max())
    crowd = scene("", 0, 1024).running
    assert wide > int(adaptive.draft_lengths(step, crowd).max()) == 0


def test_swapping_under_load_loses_nothing() -> None:
    asked = burst()
    engine = Engine(chosen(), blocks=50)
    names = ("fair", "shortest", "priority", "prefix-first", "scored", "deadline", "fcfs", "dynamic")
    for i in range(50):
        engine.tell(i * 50_000_000, SwapPolicy("batching", names[i % len(names)], {}))
        engine.tell(i * 50_000_000, SwapPolicy("eviction", ("lfu", "lru", "slru")[i % 3], {}), kv=True)
    engine.run(asked)
    assert sum(isinstance(event, PolicySwapped) for event in engine.events) == 100
    assert [one.tokens for one in asked] == tokens_of(burst, chosen())


def test_weights_that_change_while_it_runs_count_from_then_on_and_configured_ones_stay() -> None:
    def shares(*told: dict[str, float], swapped: bool = False, **options: Any) -> float:
        """Slots that ada gets, of those that both want."""
        asked = [Asked(0, 12, 20, ("ada", "bob")[i % 2]) for i in range(120)]
        engine = Engine(chosen(batching=("fair", options)), slots=4)
        for weights in told:
            engine.tell(0, Weigh(weights))
        if swapped:
            engine.tell(0, SwapPolicy("batching", "fair", {}))
        engine.run(asked)
        first = sorted(asked, key=lambda one: one.done_ns or 0)[:60]
        return sum(one.tenant == "ada" for one in first) / 60

    assert shares({"ada": 3.0}) >= 0.65
    assert shares({"ada": 3.0}, swapped=True) >= 0.65
    assert shares({"ada": 3.0}, {"bob": 3.0}) <= 0.35
    assert 0.4 <= shares({"ada": 9.0}, weights={"ada": 1.0}) <= 0.6

    quota = load_policy("eviction", "tenant-quota", {"weights": {"bob": 1.0}})
    tenant = np.where(np.arange(50) < 30, 0, 1).astype(np.int32)
    leaves = replace(some_leaves(50, equal=True), tenant=tenant, held=np.asarray([30, 20], dtype=np.int32))
    quota.weigh({"ada": 4.0, "bob": 100.0})
    assert set(np.argsort(quota.rank(5, leaves), kind="stable")[:5].tolist()) == set(range(30, 35))


def test_a_policy_that_cannot_be_weighed_is_told_as_bad() -> None:
    class Broken(type(load_policy("batching", "fcfs", {}))):  # type: ignore[misc]
        def weigh(self, weights: dict[str, float]) -> None:
            raise RuntimeError("no")

    engine = Engine(replace(chosen(), batching=Broken()))
    engine.tell(0, Weigh({"ada": 3.0}))
    engine.run([Asked(0, 12, 20)])
    assert [event.why for event in engine.events if isinstance(event, PolicyRejected)] == ["RuntimeError: no"]
