"""How many threads a container's limits leave."""

from __future__ import annotations

from pathlib import Path

from octavo.executors.threads import default_threads, quota


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


def test_there_is_always_a_thread() -> None:
    assert default_threads() >= 1
