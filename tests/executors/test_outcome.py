"""A failure is of one residency, whoever counts them."""

from __future__ import annotations

from octavo.core.messages import Sampling
from octavo.executors.outcome import Outcome, Settlement
from octavo.executors.residents import Resident, Run


def run_of(open_id: int) -> Run:
    return Run(0, Resident(open_id, [1, 2, 3], 3, 0, Sampling()), 0, 3, True, 0, 3)


def test_a_failure_does_not_outlive_its_scheduler() -> None:
    """The next generation counts its residencies from where the last one began."""
    settlement = Settlement(97)
    sick, heir = run_of(7), run_of(7)
    settlement.result(0, 0, [sick], [Outcome("it is not finite")])
    assert [outcome.failure for outcome in settlement.refused([sick, heir])] == ["it is not finite", None]
