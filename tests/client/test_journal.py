"""Exactly once: whatever the way does to rows, a consumer gets each token of each choice one time, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.client.journal import Journal, Verdict
from octavo.core.messages import Row

N = 2


def rows_of(truth: list[list[int]], starts: list[int], attempt: int, cuts: st.DataObject) -> list[Row]:
    """How a server might deliver all of `truth` from `starts` on: per choice, in pieces of any size."""
    rows = []
    for choice, ids in enumerate(truth):
        at = starts[choice]
        while at < len(ids):
            end = min(len(ids), at + cuts.draw(st.integers(1, 3)))
            finish = "length" if end == len(ids) else None
            rows.append(Row("r", choice, attempt, at, ids[at:end], "".join(map(chr, ids[at:end])), finish))
            at = end
    return rows


@given(truth=st.lists(st.lists(st.integers(97, 122), min_size=1, max_size=12), min_size=N, max_size=N), data=st.data())
def test_loss_doubles_and_disorder_over_attempts_never_show(truth: list[list[int]], data: st.DataObject) -> None:
    journal = Journal(N)
    got: list[list[int]] = [[] for _ in truth]
    starts = [0] * N
    in_flight: list[Row] = []
    for _ in range(data.draw(st.integers(0, 4))):
        in_flight += rows_of(truth, starts, journal.attempt, data)
        arriving = data.draw(st.lists(st.sampled_from(in_flight), max_size=20)) if in_flight else []
        for row in arriving:
            if journal.take(row) is Verdict.TAKEN:
                assert row.index == len(got[row.choice])
                got[row.choice] += row.ids
            assert all(truth[i][: len(ids)] == ids for i, ids in enumerate(got))
        starts = [len(delivered.ids) for delivered in journal.resume()]
        assert starts == [len(ids) for ids in got]
    for row in rows_of(truth, starts, journal.attempt, data):
        if journal.take(row) is Verdict.TAKEN:
            got[row.choice] += row.ids
    assert got == truth
    assert journal.done


@given(st.permutations(range(4)))
def test_a_missing_row_is_noticed_as_soon_as_a_later_one_comes(order: list[int]) -> None:
    journal = Journal(1)
    expected = 0
    for i in order:
        verdict = journal.take(Row("r", 0, 0, i, [i], "x"))
        assert verdict is (Verdict.TAKEN if i == expected else Verdict.GAP if i > expected else Verdict.DROPPED)
        expected += verdict is Verdict.TAKEN


def test_rows_of_an_earlier_attempt_are_dropped_even_where_they_would_fit() -> None:
    journal = Journal(1)
    journal.resume()
    assert journal.take(Row("r", 0, 0, 0, [1], "a")) is Verdict.DROPPED
    assert journal.take(Row("r", 0, 1, 0, [1], "a")) is Verdict.TAKEN


def test_a_choice_ends_once() -> None:
    journal = Journal(2)
    assert journal.take(Row("r", 0, 0, 0, [], "", "stop")) is Verdict.TAKEN
    assert journal.take(Row("r", 0, 0, 0, [], "", "stop")) is Verdict.DROPPED
    assert not journal.done
    (first, second) = journal.resume()
    assert (first.finished, second.finished) == (True, False)
