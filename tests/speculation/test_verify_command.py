"""The test that `octavo verify speculation` makes of sampled answers: quiet for one distribution, loud for two."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.plugins.speculation.command import speculation
from octavo.plugins.speculation.homogeneity import Homogeneity, homogeneity


def test_samples_of_one_distribution_are_rarely_called_different() -> None:
    """Level 0.01: of 400 pairs about 4; more than 14 would be one chance in 30 000."""
    draw = np.random.default_rng(1)
    p = 1 / np.arange(1, 60)
    pairs = (draw.choice(59, size=(2, 500), p=p / p.sum()).tolist() for _ in range(400))
    assert sum(homogeneity(one, other).p < 0.01 for one, other in pairs) <= 14


def test_samples_of_two_distributions_are_told_apart() -> None:
    draw = np.random.default_rng(2)
    one = draw.choice(3, size=500, p=[0.5, 0.3, 0.2]).tolist()
    assert homogeneity(one, draw.choice(3, size=500, p=[0.3, 0.5, 0.2]).tolist()).p < 1e-4
    assert homogeneity([1] * 500, [1] * 500).p == 0.5
    assert homogeneity([1] * 500, [2] * 500).p < 1e-9


@pytest.mark.parametrize(("statistic", "degrees", "p"), [(18.307, 10, 0.05), (37.57, 20, 0.01), (10.83, 1, 0.001)])
def test_levels_are_those_of_the_tables(statistic: float, degrees: int, p: float) -> None:
    assert Homogeneity(statistic, degrees).p == pytest.approx(p, rel=0.2)


def test_a_daemon_that_does_not_start_is_told_in_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert speculation(drafter="ngram", model="/no/such.gguf") == 1
    assert "there is no model '/no/such.gguf'" in capsys.readouterr().err
