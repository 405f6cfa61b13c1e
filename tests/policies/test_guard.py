"""The guard: bad answers are replaced, a bad policy is tripped with a dump that repeats, and swapping loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.core.config.schema import PolicyConfig
from octavo.core.plugins import PluginError
from octavo.core.policy import Policies, PolicyHost, dump, load_policies
from octavo.core.policy.guard import BAD_ALLOWED, SLOW_ALLOWED, WINDOW
from octavo.core.policy.load import find_policy, load_policy
from octavo.core.policy.rules import MAX_SENT_BACK
from octavo.core.trace.catalogue import PolicyNotSwapped, PolicyRejected, PolicySwapped, PolicyTripped
from octavo.plugins.policykit.asking import columns
from octavo.plugins.policykit.views import scene, scenes, some_leaves, splits
from octavo.policies.contract import Observed, Running, Selection, Step, Waiting
from tests.policies.bad import BAD, Duplicates, Hangs, ObserveRaises, OutOfRange, StarvesDecodes

SCENE = scene("", 20, 12)


def policies(**chosen: Any) -> Policies:
    return replace(load_policies(PolicyConfig()), **chosen)


def ask_all(host: PolicyHost) -> list[Any]:
    """One answer of each group for each view."""
    given: list[Any] = []
    for s in scenes():
        given.append(host.select(s.step, s.waiting, s.running).admit)
        given.append(host.victims(s.step, 5, s.running))
        given.append(host.draft_lengths(s.step, s.running))
    given += [host.split(step, left, decodes) for _, step, left, decodes in splits()]
    return [*given, host.rank(5, some_leaves(50))]


ANSWERS_BADLY = [
    (group, policy) for group, policy, _ in BAD if policy not in (Hangs, ObserveRaises, StarvesDecodes)
    and not policy.__name__.startswith(("Slow", "Starves", "Dices", "NoProgress", "Mutates"))
    and (group, policy.__name__) != ("speculation", "OverBudget")
]  # fmt: skip


@pytest.mark.parametrize(("group", "policy"), ANSWERS_BADLY, ids=lambda value: getattr(value, "__name__", value))
def test_the_kernels_rule_stands_in_for_a_bad_answer(group: str, policy: type[Any]) -> None:
    host = PolicyHost(policies(**{group: policy()}))
    given = ask_all(host)
    events = host.drain_events()
    assert {e.group for e in events if isinstance(e, PolicyRejected)} == {group}
    # Whatever the bad policy says, from the trip on the answers are the plain ones.
    if any(isinstance(e, PolicyTripped) for e in events):
        plain = ask_all(PolicyHost(policies()))
        assert all(np.array_equal(a, b) for a, b in zip(ask_all(host), plain, strict=True))
    assert len(given) == len(ask_all(PolicyHost(policies())))


def test_three_bad_answers_trip_and_the_dump_repeats_the_last_one() -> None:
    host = PolicyHost(policies(batching=Duplicates()))
    for i in range(BAD_ALLOWED):
        assert host.stats["policy_tripped"] == 0
        assert host.stats["policy_rejected"] == i
        admit = host.select(SCENE.step, SCENE.waiting, SCENE.running).admit
        assert admit.tolist() == list(range(20))
    assert host.stats["policy_tripped"] == 1
    *rejected, tripped = host.drain_events()
    assert len(rejected) == BAD_ALLOWED
    assert isinstance(tripped, PolicyTripped)
    assert tripped.why == "3 bad answers within 100 calls, the last one: admit must be distinct; 0 comes 2 times"
    again = json.loads(msgspec.json.encode(tripped))["dump"]
    views = dump.arguments(again)
    for shown, seen in zip(columns(tuple(views)), columns((SCENE.step, SCENE.waiting, SCENE.running)), strict=True):
        assert shown.dtype == seen.dtype
        assert np.array_equal(shown, seen)
        assert not shown.flags.writeable
    assert views[0] == SCENE.step
    assert len(dump.repeat(again, Duplicates()).admit) == 40
    host.select(SCENE.step, SCENE.waiting, SCENE.running)
    assert host.drain_events() == []  # it is not asked any more


class BadEvery:
    """Bad once in `period` calls."""

    def __init__(self, period: int) -> None:
        self._period = period
        self._calls = 0

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        self._calls += 1
        return (OutOfRange if self._calls % self._period == 0 else StarvesDecodes)().select(step, waiting, running)


@pytest.mark.parametrize(("period", "tripped"), [(10, True), (49, True), (50, False), (200, False)])
def test_a_rare_bad_answer_does_not_trip(period: int, tripped: bool) -> None:
    host = PolicyHost(policies(batching=BadEvery(period)))
    for _ in range(10 * WINDOW):
        host.select(SCENE.step, SCENE.waiting, SCENE.running)
    assert bool(host.stats["policy_tripped"]) == tripped


@pytest.mark.parametrize(("share", "tripped"), [(1.0, True), (0.6, True), (0.4, False), (0.0, False)])
def test_a_policy_that_is_slow_half_of_the_time_is_tripped(share: float, tripped: bool) -> None:
    def clock() -> Iterator[int]:
        now, owed = 0, 0.0
        while True:
            yield now
            owed += share
            now += 301_000 if owed >= 1 else 299_000
            owed -= owed >= 1
            yield now

    host = PolicyHost(policies(batching=load_policy("batching", "shortest", {})), clock=clock().__next__)
    for _ in range(3 * WINDOW):
        host.select(SCENE.step, SCENE.waiting, SCENE.running)
    assert bool(host.stats["policy_tripped"]) == tripped
    slow = [event for event in host.drain_events() if isinstance(event, PolicyTripped)]
    assert all("took longer than 300 µs, the last one 301 µs" in event.why for event in slow)
    assert host.stats["policy_slow"] == (SLOW_ALLOWED if tripped else int(share * 3 * WINDOW + 1e-9))


def test_a_slow_answer_is_used() -> None:
    host = PolicyHost(
        policies(batching=load_policy("batching", "priority", {})), clock=iter(range(0, 10**9, 10**6)).__next__
    )
    admit = host.select(SCENE.step, SCENE.waiting, SCENE.running).admit
    assert SCENE.waiting.priority[admit[0]] == SCENE.waiting.priority.max()
    assert host.stats["policy_slow"] == 1


def test_who_was_sent_back_often_is_the_last_victim() -> None:
    tried = np.where(np.arange(12) >= 10, MAX_SENT_BACK, 0).astype(np.int32)
    victims = PolicyHost(policies()).victims(SCENE.step, 5, replace(SCENE.running, preemptions=tried))
    assert sorted(victims.tolist()) == list(range(12))
    assert set(victims.tolist()[-2:]) == {10, 11}


def test_a_policy_may_learn_and_its_mistakes_there_count_too() -> None:
    nothing: Any = np.zeros(0, dtype=np.int64)
    told = Observed(1, *[nothing] * 13)
    host = PolicyHost(policies(batching=ObserveRaises()))
    assert host.observing
    for _ in range(BAD_ALLOWED):
        host.select(SCENE.step, SCENE.waiting, SCENE.running)
        host.observe(told)
    assert host.stats["policy_tripped"] == 1
    assert not PolicyHost(policies()).observing


def test_a_swapped_policy_answers_the_next_call_with_a_clean_record() -> None:
    host = PolicyHost(policies(batching=Duplicates()))
    for _ in range(BAD_ALLOWED):
        host.select(SCENE.step, SCENE.waiting, SCENE.running)
    host.drain_events()
    host.swap("batching", "shortest", {"ageing": 0.0})
    assert host.drain_events() == [PolicySwapped(group="batching", old="fcfs", new="shortest", options={"ageing": 0.0})]
    assert host.names["batching"] == "shortest"
    assert host.observing
    assert host.stats["policy_tripped"] == 0
    admit = host.select(SCENE.step, SCENE.waiting, SCENE.running).admit
    assert admit.tolist() != list(range(20))


@pytest.mark.parametrize(
    ("group", "name", "options", "why"),
    [
        ("batching", "shortes", {}, "no octavo.batching plugin is called 'shortes'"),
        ("batching", "shortest", {"aging": 1}, "aging: no such option; did you mean ageing?"),
        ("batching", "scored", {"scores": {"luck": 1.0}}, "no octavo.batching.score is called 'luck'"),
        ("bathing", "shortest", {}, "there is no group of policies 'bathing'"),
    ],
)
def test_a_swap_that_cannot_be_made_changes_nothing(group: str, name: str, options: dict[str, Any], why: str) -> None:
    host = PolicyHost(policies())
    host.swap(group, name, options)
    (event,) = host.drain_events()
    assert isinstance(event, PolicyNotSwapped)
    assert why in event.why
    assert host.names == load_policies(PolicyConfig()).names


def test_a_policy_for_another_contract_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        contract = 0

        def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
            raise NotImplementedError

    monkeypatch.setattr("octavo.core.policy.load.resolve", lambda group, name: Older)
    with pytest.raises(PluginError, match="was written for contract 0, this Octavo has 1"):
        find_policy("batching", "older")
    Older.contract = 1
    with pytest.raises(PluginError, match="has no method split"):
        find_policy("chunking", "older")
