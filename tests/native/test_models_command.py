"""`octavo models` says what a file is, who runs it, and why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.executors.models import command, describe
from octavo.executors.native import level
from octavo.executors.threads import default_threads
from tests.executors.test_loading import write_gguf
from tests.executors.tiny import save_tiny
from tests.native.families import save_family
from tests.native.test_bad_files import GGUF


def test_a_folder_of_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each model there, one that is damaged and one of another kind among them."""
    write_gguf(tmp_path / "plain.gguf", save_tiny(tmp_path / "plain", **GGUF))
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "plain.gguf").read_bytes()[:5000])
    save_family("gemma2", tmp_path / "gemma")
    save_family("mixtral", tmp_path / "mixtral")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert command(str(tmp_path)) == 0
    text = capsys.readouterr().out
    for said in (
        "llama: 3 layers of 64, 4 heads of 16, 2 for keys, 97 tokens",
        "512 tokens (rotation: default, base 10000)",
        "Q8_0",
        "a window of 24 in 2 of 4 layers",
        "cpu      no: it does not have",
        "2 of 5 experts",
        "no: " + str(tmp_path / "other") + " is a model of type 'mamba'",
        "fetch it again",
    ):
        assert said in text, text
    assert command(str(tmp_path), json_=True) == 0
    found = {Path(each["model"]).name: each for each in json.loads(capsys.readouterr().out)}
    assert set(found["plain.gguf"]["runs"]) == {"native", "cpu", "cuda"}
    assert set(found["gemma"]["runs"]) == {"native", "cuda"}
    assert not found["cut.gguf"].get("runs")


def test_what_no_program_knows_may_be_the_librarys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere"}))
    (tmp_path / "model.safetensors").touch()
    assert command(str(tmp_path)) == 0
    assert "perhaps: it is tried at start" in capsys.readouterr().out
    assert describe(str(tmp_path)).runs.keys() == {"transformers"}


def test_nothing_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(tmp_path)) == 1
    assert "nothing that can be run" in capsys.readouterr().err


def test_the_default_model() -> None:
    found = describe("default")
    assert found.level.endswith(f"{default_threads()} threads")
    assert found.context == 8192
    assert found.weights == {"Q4_1": 210, "Q8_0": 1}
    assert found.runs["native"].startswith("yes, each weight as it is stored")


def test_a_library_that_is_not_built_is_not_built_to_tell_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level, "cache_folder", lambda: tmp_path)
    assert "not built yet" in level.level()
    assert not any(tmp_path.iterdir())
