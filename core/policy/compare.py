"""Where two answers of policies to the same call differ, as far as it matters, in words and with the rows' key columns.

Only what the kernel would have acted on counts: with two free slots, the first two of an order; with a need of five
blocks, the leaves that go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from octavo.core.policy.copies import Call, Drafted, Ranked, Selected, Split, Victims
from octavo.policies.contract import NEVER, Floats, Ints, Mask, Running, Selection, Step, Waiting

V = TypeVar("V", Waiting, Running)

SHOWN = 4
"""Rows of a difference that are shown."""


class Difference(NamedTuple):
    """`kind` is what differs, for counting; then a line each of what was asked, what `live` said and what `mine`."""

    kind: str
    asked: str
    live: str
    mine: str


def compare(call: Call, mine: object) -> list[Difference]:
    """Of the kernel's answer in the call and another one, which has been checked as that was."""
    match call, mine:
        case Selected(), Selection():
            return list(_selections(call, mine))
        case Split(), np.ndarray():
            return list(_splits(call, mine))
        case Victims(), np.ndarray():
            return list(_victims(call, mine))
        case Ranked(), np.ndarray():
            return list(_ranks(call, mine))
        case Drafted(), np.ndarray():
            return list(_drafts(call, mine))
        case _:
            raise TypeError(f"a {type(mine).__name__} is no answer to {type(call).__name__}")


# ── each group ───────────────────────────────────────────────────────────────────────────────────


def _selections(call: Selected, mine: Selection) -> Iterator[Difference]:
    step, waiting, running, live = call.step, call.waiting, call.running, call.answer
    asked = (
        f"step {step.step}: {len(waiting)} waiting, {len(running)} running, {step.free_slots} free slots, "
        f"{step.credit} blocks of credit"
    )
    taken, takes = _indices(live.preempt), _indices(mine.preempt)
    room = step.free_slots if len(waiting) else 0
    admitted = live.admit[: max(room, len(taken) > 0)].tolist()
    admits = mine.admit[: max(room, len(takes) > 0)].tolist()
    if admitted != admits:
        kind = "the same in another order" if sorted(admitted) == sorted(admits) else "admits others"
        yield Difference(kind, asked, *(_rows(_waiting, which, step, waiting) for which in (admitted, admits)))
    if taken != takes:
        yield Difference(
            "takes others' slots", asked, *(_rows(_running, which, step, running) for which in (taken, takes))
        )
    left_out, leaves_out = (_left_out(one.decode, running) for one in (live, mine))
    if left_out != leaves_out:
        yield Difference(
            "lets others decode",
            asked,
            *(
                f"leaves out {_rows(_running, which, step, running)}" if which else "lets all decode"
                for which in (left_out, leaves_out)
            ),
        )
    refused, refuses = sorted(_indices(live.refuse)), sorted(_indices(mine.refuse))
    if refused != refuses:
        yield Difference(
            "refuses others", asked, *(_rows(_waiting, which, step, waiting) for which in (refused, refuses))
        )


def _splits(call: Split, mine: Ints) -> Iterator[Difference]:
    if np.array_equal(call.answer, mine):
        return
    step = call.step
    asked = (
        f"step {step.step}: {len(call.remaining)} prefills with {_some(call.remaining)} tokens left, a budget of "
        f"{step.chunk_budget}, {call.decode_tokens} of it for decodes"
    )
    yield Difference("divides otherwise", asked, f"gives {_some(call.answer)}", f"gives {_some(mine)}")


def _victims(call: Victims, mine: Ints) -> Iterator[Difference]:
    live, other = (_until(order, call.candidates.blocks, call.need) for order in (call.answer, mine))
    if set(live) != set(other):
        asked = f"step {call.step.step}: {call.need} blocks short, {len(call.candidates)} candidates"
        yield Difference(
            "sends others back",
            asked,
            *(_rows(_running, which, call.step, call.candidates) for which in (live, other)),
        )


def _ranks(call: Ranked, mine: Floats) -> Iterator[Difference]:
    leaves = call.leaves
    live, other = (set(np.argsort(score, kind="stable")[: call.need].tolist()) for score in (call.answer, mine))
    if live == other:
        return

    def leaf(i: int) -> str:
        age_s = (leaves.now_ns - int(leaves.last_used_ns[i])) / 1e9
        return (
            f"#{i} (used {age_s:.1f} s ago, found {leaves.hits[i]} times, {leaves.depth[i]} blocks before it, "
            f"tenant {leaves.tenant[i]})"
        )

    asked = f"{call.need} blocks are needed, {len(leaves)} leaves"
    yield Difference(
        "evicts others",
        asked,
        *(", ".join(leaf(i) for i in sorted(a - b)[:SHOWN]) for a, b in ((live, other), (other, live))),
    )


def _drafts(call: Drafted, mine: Ints) -> Iterator[Difference]:
    decoding = call.running.decoding
    live, other = call.answer[decoding], mine[decoding]
    if not np.array_equal(live, other):
        asked = f"step {call.step.step}: {len(live)} decode, {call.step.credit} blocks of credit"
        yield Difference("drafts otherwise", asked, f"drafts {_some(live)}", f"drafts {_some(other)}")


# ── rows in words ────────────────────────────────────────────────────────────────────────────────


def _waiting(i: int, step: Step, view: Waiting) -> str:
    text = (
        f"#{i} (waited {_s(step.now_ns - int(view.arrival_ns[i]))}, {view.known[i]} tokens, {view.cached[i]} cached, "
        f"up to {view.output_left[i]} to go"
    )
    return f"{text}{_whose(i, step, view)})"


def _running(i: int, step: Step, view: Running) -> str:
    text = (
        f"#{i} (arrived {_s(step.now_ns - int(view.arrival_ns[i]))} ago, {view.planned[i]} of {view.known[i]} tokens "
        f"planned, up to {view.output_left[i]} to go, {view.blocks[i]} blocks"
    )
    return f"{text}{_whose(i, step, view)})"


def _whose(i: int, step: Step, view: Waiting | Running) -> str:
    tenant = int(view.tenant[i])
    name = step.tenants[tenant] if tenant < len(step.tenants) else ""
    parts = [f"tenant {name}" if name else ""]
    parts.append(f"priority {view.priority[i]}" if view.priority[i] else "")
    if int(view.deadline_ns[i]) != NEVER:
        parts.append(f"deadline in {_s(int(view.deadline_ns[i]) - step.now_ns)}")
    if view.preemptions[i]:
        parts.append(f"lost its slot {view.preemptions[i]} times")
    return "".join(f", {part}" for part in parts if part)


def _rows(row: Callable[[int, Step, V], str], which: list[int], step: Step, view: V) -> str:
    more = f" and {len(which) - SHOWN} more" if len(which) > SHOWN else ""
    return (", ".join(row(i, step, view) for i in which[:SHOWN]) or "nobody") + more


def _some(values: Iterable[int]) -> str:
    shown = [int(value) for value in values]
    return f"[{', '.join(map(str, shown[: 2 * SHOWN]))}{', …' if len(shown) > 2 * SHOWN else ''}]"


def _s(ns: int) -> str:
    return f"{ns / 1e9:.2f} s"


def _indices(column: Ints | None) -> list[int]:
    return [] if column is None else column.tolist()


def _left_out(decode: Mask | None, running: Running) -> list[int]:
    return [] if decode is None else np.flatnonzero(running.decoding & ~decode).tolist()


def _until(order: Ints, blocks: Ints, need: int) -> list[int]:
    """Of the order, those that are needed."""
    before = np.cumsum(blocks[order]) - blocks[order]
    needed: list[int] = order[before < need].tolist()
    return needed
