"""Where the library comes from, and what is said when it cannot come."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.kernels.cpu import build


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes what it was asked into its output file, at once."""
    path = tmp_path / "fake-c++"
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1; exit; fi\n'
        'all="$*"\nwhile [ $# -gt 1 ]; do shift; done\necho "$all" > "$1"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_a_library_is_built_once(compiler: Path, tmp_path: Path) -> None:
    first = build.library(tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert build.library(tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_other_flags_make_another_library(compiler: Path, tmp_path: Path) -> None:
    assert build.library(tmp_path / "cache") != build.library(tmp_path / "cache", ("-O1",))


def test_a_library_that_is_there_needs_no_compiler(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    built = build.library(tmp_path / "cache", before=lambda: told.append("it takes a while"))
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("CXX")
    assert build.library(tmp_path / "cache", before=lambda: told.append("again")) == built
    assert told == ["it takes a while"]


def test_a_library_that_the_package_brought_is_taken(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for source in build.SOURCES.glob("*.[ch]*"):
        (package / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", package)
    built = build.library(tmp_path / "cache")
    shipped = package / built.name
    built.rename(shipped)
    assert build.library(tmp_path / "cache") == shipped


def test_a_compiler_that_fails_is_quoted(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text(compiler.read_text() + "echo no >&2; exit 7\n")
    with pytest.raises(build.BuildError, match=r"ended with 7:\nno"):
        build.library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_the_other_executor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r'executor.kind = "cpu"'):
        build.library(tmp_path / "cache")


def test_of_those_who_want_it_at_once_one_builds(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text(compiler.read_text().replace("all=", f"sleep 0.05; echo >> {tmp_path / 'calls'}; all="))
    with ThreadPoolExecutor(4) as callers:
        built = set(callers.map(lambda _: build.library(tmp_path / "cache"), range(4)))
    assert len(built) == 1
    assert (tmp_path / "calls").read_text().count("\n") == len(build.flags()) + 2
