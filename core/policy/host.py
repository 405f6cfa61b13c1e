"""The policy host stands between the kernel and each policy: its answers are always valid.

Every call is checked and timed. A bad answer (or an exception) is replaced by the kernel's own rule for this step
and reported; too many of them, or too many slow ones, and the policy is tripped: the rule stands in until it is
swapped. The integrity of the kernel does not depend on that: a policy has nothing but copies.

Pure but for the clock, which the shell hands in; without one nothing is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from octavo.core.plugins import PluginError
from octavo.core.policy import answers, dump, rules
from octavo.core.policy.answers import InvalidAnswer
from octavo.core.policy.guard import Guard
from octavo.core.policy.load import METHODS, Policies, load_policy
from octavo.core.policy.watch import Watch
from octavo.core.trace.catalogue import Event, PolicyNotSwapped, PolicyRejected, PolicySwapped, PolicyTripped
from octavo.policies.contract import (
    Floats,
    Ints,
    Leaves,
    Observed,
    Observer,
    Running,
    Selection,
    Step,
    Waiting,
    Weighing,
)

T = TypeVar("T")

CALL_BUDGET_NS = 300_000

_STATS = {
    group: tuple(f"policy_{group}_{what}" for what in ("calls", "us", "rejected", "tripped")) for group in METHODS
}


def no_clock() -> int:
    """No time passes."""
    return 0


class PolicyHost:
    """Asks the policies of the scheduler and of the KV-manager. `clock` gives ns; a call may take `budget_ns` of it."""

    def __init__(
        self,
        policies: Policies,
        *,
        clock: Callable[[], int] = no_clock,
        budget_ns: int = CALL_BUDGET_NS,
        watch: Watch | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`weights` are the configured ones of tenants, for policies that are set later."""
        self._policies = policies
        self._clock = clock
        self._budget_ns = budget_ns
        self._weights = weights or {}
        self._told_weights: Mapping[str, float] = {}
        self._watch = Watch() if watch is None else watch
        self._events: list[Event] = []
        self._guards = {group: Guard() for group in METHODS}
        self._told_ns = 0
        self._observers = self._find_observers()
        self._spent_ns = 0
        """Of the last call."""
        self._watch.named(policies.names)

    @property
    def names(self) -> dict[str, str]:
        """Group → name of its policy."""
        return dict(self._policies.names)

    @property
    def stats(self) -> dict[str, int]:
        """For status and metrics."""
        guards = self._guards.values()
        each: dict[str, int] = {}
        for group, guard in self._guards.items():
            if guard.calls or guard.tripped:
                calls, spent, rejected, tripped = _STATS[group]
                each[calls], each[spent] = guard.calls, guard.spent_ns // 1000
                each[rejected], each[tripped] = guard.bad_calls, int(bool(guard.tripped))
        return {
            "policy_rejected": sum(guard.bad_calls for guard in guards),
            "policy_slow": sum(guard.slow_calls for guard in guards),
            "policy_tripped": sum(bool(guard.tripped) for guard in guards),
            **each,
        }

    def take_spent_ns(self) -> int:
        """What all calls took since this was last asked."""
        total = sum(guard.spent_ns for guard in self._guards.values())
        spent, self._told_ns = max(0, total - self._told_ns), total
        return spent

    def drain_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        asked = (step, waiting, running)
        answer = self._ask(
            "batching",
            self._policies.batching.select,
            asked,
            lambda given: answers.selection(given, waiting, running),
        )
        return self._given("batching", asked, rules.select_in_order(waiting) if answer is None else answer)

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        asked = (step, remaining, decode_tokens)
        answer = self._ask(
            "chunking",
            self._policies.chunking.split,
            asked,
            lambda given: answers.chunks(given, step, remaining, decode_tokens),
        )
        return self._given("chunking", asked, rules.split_in_order(*asked) if answer is None else answer)

    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        """All candidates in the order in which they should give way."""
        asked = (step, need, candidates)
        answer = self._ask(
            "preemption",
            self._policies.preemption.victims,
            asked,
            lambda given: answers.victims(given, candidates),
        )
        order = rules.youngest_first(candidates)
        if answer is not None:
            order = np.concatenate([answer, order[~np.isin(order, answer)]])
        return self._given("preemption", asked, rules.spare_the_tried(order, candidates))

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        asked = (step, running)
        answer = self._ask(
            "speculation",
            self._policies.speculation.draft_lengths,
            asked,
            lambda given: answers.drafts(given, running),
        )
        return self._given("speculation", asked, rules.no_drafts(running) if answer is None else answer)

    def rank(self, need: int, leaves: Leaves) -> Floats:
        """As `Eviction.rank`, so that the KV-manager can use the host in a policy's place."""
        asked = (need, leaves)
        answer = self._ask("eviction", self._policies.eviction.rank, asked, lambda given: answers.scores(given, leaves))
        return self._given("eviction", asked, rules.least_recent(leaves) if answer is None else answer)

    def _ask(
        self, group: str, method: Callable[..., Any], arguments: tuple[Any, ...], check: Callable[[Any], T]
    ) -> T | None:
        """The checked answer, or None if the kernel's own rule has to stand in."""
        guard, self._spent_ns = self._guards[group], 0
        if guard.tripped:
            return None
        guard.calls += 1
        given, checked = None, None
        self._watch.begins(group)
        before = self._clock()
        try:
            given = method(*arguments)
            spent = self._clock() - before
            checked = check(given)
        except Exception as error:  # noqa: BLE001 - a policy is a stranger's code: whatever it raises is a bad answer
            spent = 0
            self._bad(group, error)
        self._watch.ends()
        self._spent_ns = spent
        guard.spent_ns += spent
        if spent > self._budget_ns:
            guard.slow(spent, self._budget_ns)
        if guard.tripped:
            self._events.append(
                PolicyTripped(
                    group=group,
                    policy=self._policies.names[group],
                    why=guard.tripped,
                    dump=dump.call(group, arguments, given),
                )
            )
        return checked

    def _given(self, group: str, asked: tuple[Any, ...], answer: T) -> T:
        """What the kernel goes by."""
        self._watch.answered(group, asked, answer, self._spent_ns)
        return answer

    def _bad(self, group: str, error: Exception) -> None:
        why = str(error) if isinstance(error, InvalidAnswer) else f"{type(error).__name__}: {error}"
        self._guards[group].bad(why)
        self._events.append(PolicyRejected(group=group, policy=self._policies.names[group], why=why))

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    @property
    def observing(self) -> bool:
        """Whether any policy, or who looks on, wants to know what happened."""
        return self._watch.observing or bool(self._observers)

    def observe(self, observed: Observed) -> None:
        for group, observer in self._observers.items():
            guard = self._guards[group]
            if guard.tripped:
                continue
            self._watch.begins(group)
            try:
                observer.observe(observed)
            except Exception as error:  # noqa: BLE001 - as above
                self._bad(group, error)
                if guard.tripped:
                    name = self._policies.names[group]
                    self._events.append(PolicyTripped(group=group, policy=name, why=guard.tripped, dump={}))
            self._watch.ends()
        self._watch.observed(observed)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Tenants' shares are these from now on, but for those that the configuration has fixed."""
        self._told_weights = weights
        for group in METHODS:
            self._weigh(group)

    def _weigh(self, group: str) -> None:
        policy, guard = getattr(self._policies, group), self._guards[group]
        if not isinstance(policy, Weighing) or guard.tripped:
            return
        self._watch.begins(group)
        try:
            policy.weigh(dict(self._told_weights))
        except Exception as error:  # noqa: BLE001 - as above
            self._bad(group, error)
        self._watch.ends()

    def _find_observers(self) -> dict[str, Observer]:
        """By group; one object that serves several groups is told once."""
        found: dict[int, tuple[str, Observer]] = {}
        for group in METHODS:
            policy = getattr(self._policies, group)
            if group != "eviction" and isinstance(policy, Observer):
                found.setdefault(id(policy), (group, policy))
        return dict(found.values())

    # ── swapping ─────────────────────────────────────────────────────────────────────────────────

    def swap(self, group: str, name: str, options: Mapping[str, Any], disabled: str = "") -> None:
        """From the next call on another policy answers, with a clean record. If it cannot be made, nothing changes.

        One that is `disabled` (the text says why: it hung, or took its process with it) is not even made: the kernel's
        rule stands in until another is set."""
        if disabled:
            self._disable(group, name, disabled)
            return
        old = self._policies.names.get(group, "")
        try:
            if group not in METHODS:
                raise PluginError(f"there is no group of policies {group!r}; there are {', '.join(METHODS)}")
            self._watch.named({**self._policies.names, group: name})
            self._watch.begins(group)  # a constructor may hang as well
            policy = load_policy(group, name, options, self._weights)
        except PluginError as error:
            self._events.append(PolicyNotSwapped(group=group, policy=name, why=str(error)))
            return
        finally:
            self._watch.ends()
            self._watch.named(self._policies.names)
        self._policies = replace(self._policies, **{group: policy, "names": {**self._policies.names, group: name}})
        self._guards[group] = Guard()
        self._observers = self._find_observers()
        self._watch.named(self._policies.names)
        if self._told_weights:
            self._weigh(group)
        self._events.append(PolicySwapped(group=group, old=old, new=name, options=dict(options)))

    def _disable(self, group: str, name: str, why: str) -> None:
        self._policies = replace(self._policies, names={**self._policies.names, group: name})
        self._guards[group] = Guard()
        self._guards[group].tripped = why
        self._observers.pop(group, None)
        self._watch.named(self._policies.names)
        self._events.append(PolicyTripped(group=group, policy=name, why=why, dump={}))
