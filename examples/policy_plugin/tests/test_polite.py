"""The kit tests the contract in one line; what the policy is for is tested with its views."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from octavo_polite import Polite

from octavo.core.plugins import resolve
from octavo.plugins.policykit import check_batching
from octavo.plugins.policykit.views import SECOND, scene


def test_it_keeps_the_contract() -> None:
    check_batching(lambda: Polite(Polite.Options()))


def test_short_prompts_go_first_until_somebody_has_waited_long() -> None:
    shown = scene("three wait", 3, 0)
    waiting = replace(
        shown.waiting,
        arrival_ns=np.asarray([90, 99, 99], dtype=np.int64) * SECOND,
        known=np.asarray([900, 500, 20], dtype=np.int32),
        cached=np.zeros(3, dtype=np.int32),
    )

    def order(patience_s: float) -> list[int]:
        admitted: list[int] = (
            Polite(Polite.Options(patience_s=patience_s)).select(shown.step, waiting, shown.running).admit.tolist()
        )
        return admitted

    assert order(60) == [2, 1, 0]
    assert order(5) == [0, 2, 1]


def test_octavo_finds_it_by_name() -> None:
    assert resolve("octavo.batching", "polite") is Polite
