"""What fast mode may lose, held for the default model; and that it is measured right."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.models.errors import ModelError
from octavo.plugins.quality.command import measured, quality
from octavo.plugins.quality.measure import compare


def test_a_model_is_no_distance_from_itself() -> None:
    logits = np.random.default_rng(0).normal(size=(150, 40)).astype(np.float32)
    found = compare(logits + 3, logits, list(range(40)) * 4)
    assert found.positions == 150
    assert found.kl == pytest.approx(0, abs=1e-9)
    assert found.top1 == 1
    assert found.perplexity == pytest.approx(found.reference, rel=1e-6)


def test_figures_are_those_of_their_definitions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.3, 0.5])
    found = compare(np.log([q, p]).astype(np.float32), np.log([p, p]).astype(np.float32), [0, 2])
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum()) / 2, rel=1e-5)
    assert found.top1 == 0.5
    assert found.perplexity == pytest.approx(1 / 0.5, rel=1e-5)
    assert found.reference == pytest.approx(1 / 0.25, rel=1e-5)


LIMITS = {"file": 0.006, "bf16": 0.001}
"""Mean KL of each text from fp32, by how weights are stored; the default model's file is Q4_1 and Q8_0."""


@pytest.mark.parametrize("weights", LIMITS)
def test_fast_mode_stays_near_fp32(weights: str) -> None:
    for name, found in measured("default", weights, "bf16"):
        print(f"{weights} {name}: KL {found.kl:.5f}, top-1 {found.top1:.3f}")
        assert found.kl <= LIMITS[weights], name
        assert found.top1 >= 0.93, name
        assert found.perplexity == pytest.approx(found.reference, rel=0.05), name


def test_the_command_prints_a_line_a_text_and_refuses_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="weights file, bf16, w8, w4"):
        quality("default", weights="w2")
    with pytest.raises(ModelError, match="no weights"):
        quality("ghost")
    assert quality("default", exact=True, kv="fp32") == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["prose", "code", "chat"]
    assert {line.split()[2] for line in lines} == {"0.00000"}
