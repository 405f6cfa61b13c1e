"""`octavo kernels`: what it prints and builds, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.core.cli import main
from octavo.kernels.cuda import nvrtc


def test_list_tells_of_each_instance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--arch", "sm_80", "--name", "copy_blocks", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["kernel"], row["arch"], row["spilled"], row["threads"]) == ("copy_blocks", "sm_80", 0, 256)
    assert 0 < row["registers"] <= 32
    assert main(["kernels", "list", "--arch", "sm_80", "--name", "copy_blocks"]) == 0
    assert "0 of 166912" in capsys.readouterr().out


def test_build_makes_cubins_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kernels", "build", "--arch", "sm_80", "--arch", "sm_90a", "--name", "copy_blocks", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "2 kernels for sm_80, sm_90a" in capsys.readouterr().out
    names = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("*.cubin"))
    assert names == ["copy_blocks-sm_80", "copy_blocks-sm_90a"]


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("sm_75", "sm_75 is too old: kernels need sm_80"),
        ("hopper", "'hopper' is no arch: write sm_80"),
        ("sm_199", "does not know sm_199; it knows sm_80"),
    ],
)
def test_an_arch_that_cannot_be_is_named(arch: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", "--arch", arch]) == 1
    assert why in capsys.readouterr().err


def test_without_a_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: ["libnvrtc.so.none"])
    nvrtc.nvrtc.cache_clear()
    try:
        assert main(["kernels", "list", "--arch", "sm_80"]) == 1
    finally:
        nvrtc.nvrtc.cache_clear()
    assert "pip install nvidia-cuda-nvrtc" in capsys.readouterr().err
