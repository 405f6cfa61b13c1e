"""A failure is of one residency, whoever counts them."""

from __future__ import annotations

import numpy as np

from octavo.core.messages import Sampling, TokenLogprob
from octavo.executors.outcome import Outcome, Outcomes, Settlement
from octavo.executors.residents import Resident, Run, Runs


def runs_of(*runs: Run) -> Runs:
    return Runs.of(runs, np.zeros((1, 1), np.int32))


def run_of(open_id: int) -> Run:
    return Run(0, Resident(open_id, [1, 2, 3], 3, 0, Sampling()), 0, 3, True, 0, 3)


def test_a_failure_does_not_outlive_its_scheduler() -> None:
    """The next generation counts its residencies from where the last one began."""
    settlement = Settlement(97)
    sick, heir = run_of(7), run_of(7)
    settlement.result(0, 0, runs_of(sick), Outcomes.of([Outcome("it is not finite")]))
    assert settlement.refused(runs_of(heir, sick)) == {1: Outcome("it is not finite")}


def test_those_who_say_one_token_and_those_who_say_more_are_told_in_one_order() -> None:
    """Plain tokens as columns, others by themselves, whoever failed left out; and the residents are where that is."""
    settlement = Settlement(97)
    runs = [run_of(i) for i in range(5)]
    told = TokenLogprob(8, -0.5, [], [])
    others = {
        1: Outcome("it is not finite"),
        2: Outcome(None, (7, 8), (None, told), drafted=3, depth=2),
        4: Outcome(),
    }
    runs[2].resident.sampling = Sampling(logprobs=0)
    settlement.expect(runs_of(runs[3]), [-1])
    result = settlement.result(9, 0, runs_of(*runs), Outcomes([4, 0, 0, 6, 0], others))
    assert result.open_id.tolist() == [0, 2, 3, 4]
    assert (result.n_new.tolist(), result.tokens.tolist()) == ([1, 2, 1, 0], [4, 7, 8, 6])
    assert result.kv_len.tolist() == [3, 4, 3, 3]
    assert (result.drafted.tolist(), result.depth.tolist()) == ([0, 3, 0, 0], [0, 2, 0, 0])
    assert result.logprobs == [None, None, told, None]
    assert [(failed.open_id, failed.reason) for failed in result.failed] == [(1, "it is not finite")]
    assert [run.resident.tokens[3:] for run in runs] == [[4], [0], [7, 8], [6], []]
    assert [run.resident.kv_len for run in runs] == [3, 3, 4, 3, 3]
    assert not any(run.resident.unknown for run in runs)


def test_a_token_that_the_model_does_not_have_fails_its_own_run_alone() -> None:
    settlement = Settlement(3)
    runs = [run_of(0), run_of(1)]
    runs[1].resident.tokens[0] = 0
    runs[1].resident.tokens[2] = 2
    assert settlement.refused(runs_of(*runs)).keys() == {0}
    assert settlement.refused(runs_of(*runs)).keys() == {0}, "it stays failed"


def test_only_who_has_more_to_tell_than_a_token_is_told_by_itself() -> None:
    told = TokenLogprob(8, -0.5, [], [])
    outcomes = [
        Outcome(None, (7,), (None,)),
        Outcome(None, (8,), (told,)),
        Outcome(None, (9,), (None,), drafted=1, depth=1),
        Outcome(None, (9,), (None,), prompt=[]),
        Outcome(None, (8, 9), (None, None)),
        Outcome("it is not finite"),
        Outcome(),
    ]
    made = Outcomes.of(outcomes)
    assert [made.at(i) for i in range(len(outcomes))] == outcomes
    assert made.others.keys() == set(range(1, len(outcomes)))
