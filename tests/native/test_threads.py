"""How many threads a container's limits leave."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.core.models.errors import ModelError
from octavo.executors import threads
from octavo.executors.native.library import load
from octavo.executors.threads import default_threads, keep_to, quota
from tests.processes.daemon import daemon


def test_the_least_quota_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a/b"
    inner.mkdir(parents=True)
    assert quota(tmp_path, "/a/b") > 10**5
    (inner / "cpu.max").write_text("max 100000\n")
    assert quota(tmp_path, "/a/b") > 10**5
    (tmp_path / "a/cpu.max").write_text("350000 100000\n")
    assert quota(tmp_path, "/a/b") == 3.5
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert quota(tmp_path, "/a/b") == 0.5
    assert quota(tmp_path, "/") == 0.5


def test_version_1_and_what_cannot_be_read(tmp_path: Path) -> None:
    group = tmp_path / "cpu/box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert quota(tmp_path, "/box") > 10**5
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    assert quota(tmp_path, "/box") > 10**5  # no period: no limit that we know of
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert quota(tmp_path, "/box") == 2


def test_a_quota_of_less_than_the_cores_says_how_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    monkeypatch.setattr(threads, "_own", lambda: "/")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert default_threads() == 8
    for text, expected in (("350000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8), ("max 100000", 8)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert default_threads() == expected


def test_the_cores_of_the_configuration_are_kept_to() -> None:
    """In a thread of its own: affinity is a thread's."""
    allowed = sorted(os.sched_getaffinity(0))

    def pinned() -> tuple[set[int], int]:
        keep_to(allowed[:1])
        return os.sched_getaffinity(0), default_threads()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(pinned).result() == ({allowed[0]}, 1)
        with pytest.raises(
            ModelError, match=rf"executor.cores has core {allowed[0] + 4096}, .* may use \[{allowed[0]}"
        ):
            pool.submit(keep_to, (allowed[0], allowed[0] + 4096)).result()
        pool.submit(keep_to, ()).result()
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_only_the_executors_process_keeps_to_them() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    with daemon(f"executor.cores=[{allowed[-1]}]") as running:
        running.wait_ready()
        kept = {role: sorted(os.sched_getaffinity(pid)) for role, pid in running.pids().items()}
    assert kept.pop("executor") == [allowed[-1]]
    assert set(map(tuple, kept.values())) == {tuple(allowed)}


def test_there_is_always_a_thread() -> None:
    assert default_threads() >= 1


def test_threads_that_change_cores_may_run_where_they_might_before() -> None:
    """Beside busy processes who waits for another's chunk gives it its core."""
    allowed = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in allowed]
    try:
        load().oct_read_bandwidth(len(allowed), 64 << 20, 100)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert os.sched_getaffinity(0) == allowed
