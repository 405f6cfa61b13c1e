"""The checks themselves, one for each group of policies. See the package's docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from octavo.core.config.schema import PolicyConfig
from octavo.core.policy import answers, load_policies
from octavo.core.policy.host import CALL_BUDGET_NS
from octavo.core.policy.load import METHODS
from octavo.core.trace.catalogue import PolicyRejected
from octavo.plugins.policykit import engine, views
from octavo.plugins.policykit.asking import Check, ask, fastest_us
from octavo.plugins.policykit.fault import PolicyFault
from octavo.policies.contract import (
    Batching,
    Chunking,
    Eviction,
    Ints,
    Observer,
    Preemption,
    Selection,
    Speculation,
    Step,
)

SLOWEST_US = 10 * CALL_BUDGET_NS / 1000
"""Ten times what the guard allows on average: no test should fail because a machine is slow."""
STEEPEST = 40.0
"""Four times as much may take so many times longer; the square of four is sixteen."""
OVERRULED = 3
"""So often the kernel may have to step in: by chance, as when all that are asked for wait for their match."""
LONGEST_WAIT_S = 12.0
"""Nobody takes longer in an engine that is half idle, though a policy may collect a batch for ten seconds."""


class Case(NamedTuple):
    """One call: its name, what is passed, and what a valid answer is."""

    name: str
    arguments: tuple[Any, ...]
    check: Check


def check_batching(factory: Callable[[], Batching]) -> None:
    """Raises `PolicyFault` if the policy that `factory` makes is not fit for `octavo.batching`."""
    _check("batching", factory, [_select(s) for s in views.scenes()], [_select(_sized(n)) for n in (16, 64, 256)])


def check_chunking(factory: Callable[[], Chunking]) -> None:
    """The same for `octavo.chunking`."""

    def case(name: str, step: Step, left: Ints, decodes: int) -> Case:
        return Case(name, (step, left, decodes), lambda given: answers.chunks(given, step, left, decodes))

    cases = [case(*one) for one in views.splits()]
    step = cases[0].arguments[0]
    sizes = [case(f"{n} prefills", step, _sized(n).running.known, 0) for n in (16, 64, 256)]
    _check("chunking", factory, cases, sizes)


def check_preemption(factory: Callable[[], Preemption]) -> None:
    """The same for `octavo.preemption`."""

    def case(scene: views.Scene, need: int) -> Case:
        arguments = (scene.step, need, scene.running)
        return Case(f"{scene.name}, {need} blocks", arguments, lambda given: answers.victims(given, scene.running))

    cases = [case(scene, need) for scene in views.scenes() for need in (1, 50, 10**6)]
    _check("preemption", factory, cases, [case(_sized(n), 5) for n in (64, 256, 1024)])


def check_eviction(factory: Callable[[], Eviction]) -> None:
    """The same for `octavo.eviction`."""

    def case(name: str, need: int, leaves: Any) -> Case:
        return Case(name, (need, leaves), lambda given: answers.scores(given, leaves))

    sizes = [case(f"{n} leaves", 8, views.some_leaves(n)) for n in (256, 1024, 4096)]
    _check("eviction", factory, [case(*one) for one in views.leaves()], sizes)


def check_speculation(factory: Callable[[], Speculation]) -> None:
    """The same for `octavo.speculation`."""

    def case(scene: views.Scene) -> Case:
        return Case(scene.name, (scene.step, scene.running), lambda given: answers.drafts(given, scene.running))

    cases = [case(scene) for scene in views.scenes()]
    _check("speculation", factory, cases, [case(_sized(n)) for n in (64, 256, 1024)])


def _sized(n: int) -> views.Scene:
    return views.scene(f"{n} sequences", min(n, views.WINDOW), n)


def _select(s: views.Scene) -> Case:
    return Case(s.name, (s.step, s.waiting, s.running), lambda given: answers.selection(given, s.waiting, s.running))


# ── the steps of a check ─────────────────────────────────────────────────────────────────────────


def _check(group: str, factory: Callable[[], Any], cases: list[Case], sizes: list[Case]) -> None:
    first, second = _life(group, factory, cases), _life(group, factory, cases)
    for case, one, other in zip(cases, first, second, strict=True):
        if not _same(one, other):
            raise PolicyFault(
                f"two of its kind, shown the same, answer differently: {one!r} and {other!r}",
                f"{METHODS[group]}: {case.name}",
                "take chance from numpy.random.default_rng(step.seed) and time from now_ns, keep no state outside of "
                "the object, and do not depend on the order of a set",
            )
    _time(group, factory, sizes)
    _in_the_engine(group, factory)


def _life(group: str, factory: Callable[[], Any], cases: list[Case]) -> list[Any]:
    """The answers of a fresh policy, asked one after the other; an observer is told something in between."""
    policy = factory()
    method = METHODS[group]
    if not callable(getattr(policy, method, None)):
        raise PolicyFault(f"it has no method {method}", "", f"write `def {method}(...)` as in octavo.policies.contract")
    told = views.observed() if isinstance(policy, Observer) and group != "eviction" else []
    given = []
    for i, case in enumerate(cases):
        where = f"{method}: {case.name}"
        given.append(ask(partial(getattr(policy, method), *case.arguments), case.check, case.arguments, where))
        if told:
            observed, where = told[i % len(told)], f"observe: piece {i % len(told)}"
            ask(partial(policy.observe, observed), lambda answer: answer, (observed,), where)
    return given


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Selection):
        plain = replace(one, admit=other.admit, decode=other.decode, preempt=other.preempt, refuse=other.refuse)
        pairs = [(getattr(one, name), getattr(other, name)) for name in ("admit", "decode", "preempt", "refuse")]
        return plain == other and all(np.array_equal(a, b) if a is not None else b is None for a, b in pairs)
    return np.array_equal(one, other)


def _time(group: str, factory: Callable[[], Any], sizes: list[Case]) -> None:
    policy = factory()
    method = METHODS[group]
    spent = [fastest_us(partial(getattr(policy, method), *case.arguments)) for case in sizes]
    where = f"{method}: " + ", ".join(f"{case.name} {us:.0f} µs" for case, us in zip(sizes, spent, strict=True))
    advice = "use numpy on whole columns instead of a loop over sequences, and keep what can be kept between calls"
    if spent[-1] > SLOWEST_US:
        raise PolicyFault(f"it is slow: more than {SLOWEST_US:.0f} µs a call", where, advice)
    growth = spent[-1] / max(spent[-2], 20.0)
    if growth > STEEPEST:
        raise PolicyFault(f"with four times as much it takes {growth:.0f} times longer", where, advice)


def _in_the_engine(group: str, factory: Callable[[], Any]) -> None:
    """Closed loops: with time for everybody everyone is served in time, and with too little everyone in the end."""
    for name, asked, blocks, longest_s in (
        ("a steady stream", engine.steady(), 400, LONGEST_WAIT_S),
        ("a burst", engine.burst(), 50, float("inf")),
    ):
        where = f"{name} in the small engine (octavo.plugins.policykit.engine)"
        small = engine.Engine(replace(load_policies(PolicyConfig()), **{group: factory()}), blocks=blocks)
        small.run(asked)
        for event in small.events:
            if isinstance(event, PolicyRejected):
                raise PolicyFault(
                    f"its answer is not valid: {event.why}",
                    where,
                    "it is asked in every step, also when little changed",
                )
        if small.overruled > OVERRULED:
            raise PolicyFault(
                f"the kernel had to step in {small.overruled} times, since by this policy nothing would have moved",
                where,
                "leave nobody out for ever who could run: let what has waited long go first some time (ageing), give "
                "prompts a part of the budget, and use `wake_ns` if the engine is to wait",
            )
        lost = [i for i, one in enumerate(asked) if one.done_ns is None and not one.refused]
        if lost:
            raise PolicyFault(f"requests {lost} are never answered", where, "admit everybody at some time")
        for i, one in enumerate(asked):
            total_s = ((one.done_ns or one.at_ns) - one.at_ns) / 1e9
            if total_s > longest_s:
                raise PolicyFault(
                    f"request {i} takes {total_s:.1f} s beside an engine that is half idle ({one.prompt} prompt "
                    f"tokens, {one.output} to generate, tenant {one.tenant!r}, priority {one.priority})",
                    where,
                    "let what has waited long go first some time (ageing), and leave no slot or budget unused for long",
                )
