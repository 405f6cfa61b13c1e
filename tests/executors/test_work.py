"""How much work a step was: what was computed, not what was planned."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.messages import EMPTY, Kind, StepBind, StepPlan, StepResult, col
from octavo.core.work import Work, step_work

CHUNK, DECODE = Kind.CHUNK, Kind.DECODE


def worked(
    items: Sequence[tuple[Kind, int, int]], *, rounds: int = 1, new: list[int], drafted: list[int], skipped: list[int]
) -> Work:
    """Of items (kind, start or capacity, n) in slots 7, 6, 5 …; `new` and `drafted` of the rows that gave tokens,
    which are the last ones."""
    slots = [7 - i for i in range(len(items))]
    kinds, at, n = zip(*items, strict=True)
    none = EMPTY
    plan = StepPlan(
        1, 1, 0, none, none, none, none, none, none, none, [], [], col(slots), col(slots), col(kinds), col(at), col(n),
        0, [], rounds=rounds,
    )  # fmt: skip
    bind = StepBind(
        1, 1, none, none, none, none, none, none, none, none, none, none, col([3]), col([4]), col(skipped)
    )  # fmt: skip
    rows = col(slots[len(slots) - len(new) :])
    done = max(new) if rounds > 1 else 1
    result = StepResult(1, rows, rows, col(new), none, none, 0, 1, drafted=col(drafted), rounds=done)
    return step_work(plan, bind, result)


def test_plain_decodes_attend_to_all_of_their_tokens() -> None:
    done = worked([(DECODE, 10, 1), (DECODE, 20, 1)], new=[1, 1], drafted=[], skipped=[])
    assert done == Work(0, 2, attention=30, kv_tokens=30, copied=1)
    left = worked([(DECODE, 10, 1), (DECODE, 20, 1)], new=[1], drafted=[], skipped=[0])
    assert left == Work(0, 1, attention=20, kv_tokens=20, copied=1)


def test_a_chunk_attends_to_what_is_before_each_of_its_tokens() -> None:
    done = worked([(CHUNK, 8, 4), (DECODE, 20, 1)], new=[1], drafted=[], skipped=[])
    assert done == Work(4, 1, attention=9 + 10 + 11 + 12 + 20, kv_tokens=12 + 20, copied=1)


def test_guesses_count_as_far_as_they_were_made() -> None:
    """Three may guess 4 each: one guesses 2, of which one is right, one nothing, and one was not bound."""
    items = [(DECODE, 50, 5), (DECODE, 10, 5), (DECODE, 20, 5)]
    done = worked(items, new=[2, 1], drafted=[2, 0], skipped=[0])
    assert done == Work(0, 2, attention=6 + 7 + 8 + 16, kv_tokens=8 + 16, copied=1, guesses=2)
    assert worked(items[1:], new=[1, 1], drafted=[], skipped=[]).attention == 6 + 16


def test_rounds_count_until_the_sequence_ended() -> None:
    """One goes on for all four rounds, one ends in the second."""
    done = worked([(DECODE, 10, 4), (DECODE, 20, 4)], rounds=4, new=[4, 2], drafted=[], skipped=[])
    assert done == Work(
        0, 2, attention=7 + 8 + 9 + 10 + 17 + 18, kv_tokens=7 + 8 + 9 + 10 + 17 + 18, copied=1, rounds=4
    )
    whole = worked([(DECODE, 10, 4), (DECODE, 20, 4)], rounds=4, new=[4, 4], drafted=[], skipped=[])
    assert whole.attention == whole.kv_tokens == done.attention + 19 + 20
    assert (whole.decodes, whole.rounds) == (2, 4)
