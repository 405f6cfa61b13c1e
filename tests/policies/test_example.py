"""examples/policy_plugin is a package that a stranger can install beside Octavo: it installs, its tests pass, and the
configuration finds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The source and an environment in which it is installed, without touching the one that tests run in."""
    source = tmp_path_factory.mktemp("source") / "policy_plugin"  # a copy: building leaves traces
    target = tmp_path_factory.mktemp("target")
    copytree(root / "examples/policy_plugin", source, ignore=ignore_patterns("__pycache__", "*.egg-info", "build"))
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source), environ={}, cwd=source)
    return source, {"PYTHONPATH": str(target)}


def run(*command: str, environ: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(
        command, env=os.environ | environ, cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_its_own_tests_pass(installed: tuple[Path, dict[str, str]]) -> None:
    source, environ = installed
    out = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", environ=environ, cwd=source)
    assert "3 passed" in out


def test_the_configuration_selects_it(installed: tuple[Path, dict[str, str]]) -> None:
    source, environ = installed
    sets = ("--set", "policies.batching=polite", "--set", "policies.options.batching.patience_s=5")
    out = run(sys.executable, "-m", "octavo", "config", *sets, environ=environ, cwd=source)
    assert 'batching = "polite"' in out
    assert "patience_s = 5" in out
