"""The window of the queue that policies see: everybody while there is room, then the oldest and the most urgent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.messages import Enqueue, Sampling, col
from octavo.core.scheduler.sequence import Request, Sequence
from octavo.core.scheduler.waiting import Queue
from octavo.plugins.policykit.engine import Asked
from octavo.policies.contract import NEVER
from tests.policies.test_behaviour import chosen, run

WINDOW = 20
PART = 2
"""Each order's part of the half that is not for the oldest: a fifth of ten."""
S = 1_000_000_000


def waits(
    at: int, *, priority: int = 0, deadline_ns: int | None = None, known: int = 8, output: int = 8, tenant: int = 0,
    hint: int | None = None,
) -> Sequence:  # fmt: skip
    asked = Enqueue(
        handle=at, request_id=f"r{at}", attempt=0, ids=col(range(known)), n=1, sampling=Sampling(), max_tokens=output,
        stop_ids=[], tenant=str(tenant), priority=priority, deadline_ns=deadline_ns, namespace=b"", received_ns=0,
        trace_id="", delivered=[], finished=[],
    )  # fmt: skip
    request = Request(asked, at, 0, at // 3, at, tenant, known, known + output, frozenset())
    return Sequence(request, 0, at, list(range(known)), 0, hint=hint)


WAITING = st.fixed_dictionaries(
    {
        "priority": st.integers(-2, 5),
        "deadline_ns": st.none() | st.integers(0, 10**12),
        "known": st.integers(2, 50),
        "output": st.integers(1, 50),
        "tenant": st.integers(0, 8),
        "hint": st.none() | st.integers(0, 48),
    }
)
ORDERS: list[Callable[[Sequence], Any]] = [
    lambda s: -s.request.asked.priority,
    lambda s: NEVER if s.request.asked.deadline_ns is None else s.request.asked.deadline_ns,
    lambda s: s.request.limit - (s.hint or 0),
    lambda s: -(s.hint or 0),
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WAITING, st.sampled_from(["add", "remove", "change"])), max_size=80), st.randoms())
def test_the_window_holds_the_oldest_and_the_most_urgent_of_each_kind(
    actions: list[tuple[dict[str, Any], str]], draw: Any
) -> None:
    queue = Queue(WINDOW)
    there: list[Sequence] = []
    for at, (values, what) in enumerate(actions):
        if what == "remove" and there:
            queue.remove(there.pop(draw.randrange(len(there))))
        elif what == "change" and there:
            one = draw.choice(there)
            one.hint = values["hint"]
            queue.changed(one)
        else:
            there.append(waits(at, **values))
            queue.add(there[-1])
        if draw.random() < 0.2:
            queue.view()
    view, head = queue.view(), queue.head()
    oldest = sorted(there, key=lambda s: s.order)
    assert list(queue) == oldest
    assert len(view) == len(head) == min(len(there), WINDOW)
    assert head == sorted(head, key=lambda s: s.order)
    assert set(head) >= set(oldest[: WINDOW // 2])
    for urgency in ORDERS:
        assert set(head) >= set(sorted(there, key=lambda s: (urgency(s), s.order))[:PART])
    firsts = {s.request.tenant: s for s in reversed(oldest)}
    assert set(head) >= set(sorted(firsts.values(), key=lambda s: s.order)[:PART])
    # Whatever is shown is what is.
    assert view.known.tolist() == [len(s.tokens) for s in head]
    assert view.cached.tolist() == [s.hint or 0 for s in head]
    assert view.output_left.tolist() == [s.request.limit - len(s.tokens) for s in head]
    assert view.arrival_ns.tolist() == [s.request.arrival_ns for s in head]
    assert view.deadline_ns.tolist() == [ORDERS[1](s) for s in head]
    assert view.priority.tolist() == [s.request.asked.priority for s in head]
    assert view.tenant.tolist() == [s.request.tenant for s in head]
    assert view.known.dtype == np.int32
    assert view.arrival_ns.dtype == np.int64
    assert not view.known.flags.writeable


def test_one_that_does_not_wait_cannot_be_taken_out() -> None:
    with pytest.raises(KeyError, match="r1 choice 0 is not waiting"):
        Queue(WINDOW).remove(waits(1))


@pytest.mark.parametrize(
    ("policy", "urgent"),
    [
        ("priority", {"priority": 5}),
        ("deadline", {"within_ns": 30 * S}),
        ("shortest", {"prompt": 4, "output": 2}),
        ("fair", {"tenant": "bob"}),
    ],
)
def test_an_urgent_one_is_seen_behind_a_full_window(policy: str, urgent: dict[str, Any]) -> None:
    """Three times as many wait when it comes as policies see; it is through before a quarter of them are."""
    asked = [Asked(0, 12, 30, "ada") for _ in range(3 * WINDOW)] + [Asked(S, **{"prompt": 12, "output": 30, **urgent})]
    run(asked, chosen(batching=policy), window=WINDOW)
    before = sum((one.done_ns or 0) < (asked[-1].done_ns or 0) for one in asked[:-1])
    assert before < len(asked) / 4
