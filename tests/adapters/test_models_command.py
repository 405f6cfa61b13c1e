"""`octavo models` says what an adapter's folder is, and why one is not served."""

from __future__ import annotations

import json

import pytest

from octavo.executors.models import command, describe
from tests.adapters.conftest import Made


def test_an_adapter_among_models(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(made.base.parent)) == 0
    text = capsys.readouterr().out
    assert "is      a LoRA adapter of rank 16, on q_proj, v_proj" in text
    for name in ("native", "cpu   ", "cuda  "):
        assert f"{name}  beside the model that it was made for: --set lora.NAME={made.blue}" in text
    assert "llama: 3 layers of 48" in text


def test_one_that_is_not_served_says_why(made: Made) -> None:
    path = made.twin / "adapter_config.json"
    whole = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(whole) | {"use_dora": True}))
        found = describe(str(made.twin))
    finally:
        path.write_text(whole)
    assert not found.runs
    assert found.refused.keys() == {"native", "cpu", "cuda"}
    assert all(why.endswith("has DoRA, which is not served") for why in found.refused.values())


def test_what_can_be_no_path_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("~nobody-of-this-name/x") == 1
    assert (
        "native, cpu, cuda  no: ~nobody-of-this-name/x begins with the home folder of a user" in capsys.readouterr().out
    )
