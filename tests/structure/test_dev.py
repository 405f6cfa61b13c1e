"""`./dev` on a bare machine: what is missing is said in one line, with what to do, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A checkout that was never set up, as far as `./dev` looks before it installs anything."""
    for name in ("dev", "pyproject.toml", "requirements.lock"):
        shutil.copy(root / name, tmp_path / name)
    return tmp_path


def command(checkout: Path, name: str, script: str) -> Path:
    """A stand-in for a program, first on the path."""
    path = checkout / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def dev(checkout: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/sh", checkout / "dev", *words],
        env={**os.environ, "PATH": path, **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refusal(checkout: Path, **environ: str) -> str:
    done = dev(checkout, "setup", **environ)
    assert done.returncode == 1
    assert not (checkout / ".venv").exists()
    return done.stderr


def test_no_python(checkout: Path) -> None:
    assert "no '/nowhere/python3' here. Install Python 3.11 or newer" in refusal(checkout, PYTHON="/nowhere/python3")


def test_an_old_python_is_named_with_its_version(checkout: Path) -> None:
    old = command(checkout, "old", "case $2 in *print*) echo 3.9.18 ;; *) exit 1 ;; esac")
    assert f"'{old}' is Python 3.9.18, Octavo needs 3.11 or newer" in refusal(checkout, PYTHON=str(old))


def test_a_python_without_torch_cannot_test_a_gpu(checkout: Path) -> None:
    """By the last line of what it says itself."""
    bare = command(checkout, "bare", "printf 'Traceback\\nModuleNotFoundError: no torch\\n' >&2; exit 1")
    done = dev(checkout, "gpu-test", PYTHON=str(bare))
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"octavo: gpu-test cannot run with {bare} (ModuleNotFoundError: no torch); ./dev setup"
    )


def test_no_ensurepip(checkout: Path) -> None:
    bare = command(checkout, "bare", "case $2 in *print*) echo 3.11.2 ;; *ensurepip*) exit 1 ;; esac")
    assert "apt install python3-venv" in refusal(checkout, PYTHON=str(bare))


def test_little_disk_is_told_before_anything_is_made(checkout: Path) -> None:
    command(checkout, "df", "echo header; echo /dev/x 9 9 1048576 9% /")
    assert "takes about 3 GB" in (told := refusal(checkout))
    assert "has 1 GB free" in told


def test_help_and_doctor_need_no_set_up(checkout: Path) -> None:
    assert "usage: ./dev COMMAND" in dev(checkout).stdout
    assert "none: run ./dev setup" in dev(checkout, "doctor").stdout
    assert dev(checkout, "sevre").returncode == 2
    assert not (checkout / ".venv").exists()
