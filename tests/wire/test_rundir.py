"""Run folders: private, found by their daemon's pid, and swept when it is dead."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from octavo.core import rundir
from octavo.core.config.schema import Config, ModelConfig
from octavo.core.trace import read


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "octavo"


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_folder_and_files_are_for_their_owner_only(base: Path) -> None:
    path = rundir.create(Config())
    rundir.write(path, Config(), model="ghost", pid=os.getpid())
    assert path.parent == base
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_the_configuration_comes_back_as_it_was(base: Path) -> None:
    config = Config(model=ModelConfig(path="ghost", context=77))
    path = rundir.create(config)
    rundir.write(path, config, model="ghost", pid=os.getpid())
    assert rundir.read_config(path) == config


def test_the_newest_living_daemon_is_found(base: Path, dead_pid: int) -> None:
    assert rundir.find_run() is None
    paths = [rundir.create(Config()) for _ in range(3)]
    for path, pid in zip(paths, (os.getpid(), os.getpid(), dead_pid), strict=True):
        rundir.write(path, Config(), model="ghost", pid=pid)
    found = rundir.find_run()
    assert found is not None
    assert found.path == paths[1]
    assert rundir.find_run(paths[2]) is None
    assert [run.path for run in rundir.runs()] == paths[::-1]


def test_port_0_is_replaced_by_the_real_address(base: Path) -> None:
    path = rundir.create(Config())
    rundir.write(path, Config(), model="ghost", pid=os.getpid())
    rundir.relocate(path, "http://127.0.0.1:4711")
    info = rundir.read(path)
    assert info is not None
    assert info.address == "http://127.0.0.1:4711"


def test_dead_runs_are_swept_but_for_the_newest_few(base: Path, dead_pid: int) -> None:
    dead = []
    living = rundir.create(Config())
    rundir.write(living, Config(), model="ghost", pid=os.getpid())
    for _ in range(rundir.KEPT_RUNS + 2):
        dead.append(rundir.create(Config()))
        rundir.write(dead[-1], Config(), model="ghost", pid=dead_pid)
    fresh = rundir.create(Config())
    assert set(base.iterdir()) == {living, fresh, *dead[-rundir.KEPT_RUNS :]}


def test_starts_that_failed_push_no_run_out(base: Path, dead_pid: int) -> None:
    ran = rundir.create(Config())
    rundir.write(ran, Config(), model="ghost", pid=dead_pid)
    rundir.served(ran)
    for _ in range(rundir.KEPT_RUNS + 1):
        failed = rundir.create(Config())
        rundir.write(failed, Config(), model="ghost", pid=dead_pid)
    rundir.create(Config())
    assert ran.is_dir()
    assert read.find(None) == ran, "the trace of a start that failed tells nothing of requests"


ON_A_FULL_DISK = """
import resource
from octavo.core.config.schema import Config
from octavo.core.supervisor.main import serve

resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
raise SystemExit(serve(Config()))
"""


def test_a_start_on_a_full_disk_fails_and_leaves_nothing(base: Path) -> None:
    """A bound of the file's size stands for the disk's."""
    ran = subprocess.run([sys.executable, "-c", ON_A_FULL_DISK], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1, ran.stderr
    assert "File too large" in ran.stderr
    assert list(base.iterdir()) == []


def test_without_a_run_that_served_the_newest_start_is_read(base: Path, dead_pid: int) -> None:
    with pytest.raises(read.NoSuchRun, match=str(base)):
        read.find(None)
    for _ in range(2):
        path = rundir.create(Config())
        rundir.write(path, Config(), model="ghost", pid=dead_pid)
    assert read.find(None) == path


def test_a_configured_folder_in_use_is_refused_with_the_pid(tmp_path: Path, dead_pid: int) -> None:
    config = Config(run_dir=str(tmp_path / "mine"))
    path = rundir.create(config)
    rundir.write(path, config, model="ghost", pid=dead_pid)
    assert rundir.create(config) == path, "its daemon is dead"
    rundir.write(path, config, model="ghost", pid=os.getpid())
    with pytest.raises(FileExistsError, match=str(os.getpid())):
        rundir.create(config)


def test_a_daemon_is_not_mistaken_for_a_later_process_with_its_pid(base: Path) -> None:
    path = rundir.create(Config())
    info = rundir.write(path, Config(), model="ghost", pid=os.getpid())
    assert info.alive()
    assert not msgspec.structs.replace(info, birth=info.birth - 1).alive()


def test_a_process_that_only_waits_to_be_collected_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert rundir.process_birth(process.pid) is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert rundir.process_birth(process.pid) is None
    process.communicate()


def test_where_no_daemon_was_looked_for_is_told(base: Path, tmp_path: Path) -> None:
    assert str(base) in rundir.none_runs(None)
    assert "--run" in rundir.none_runs(None)
    assert str(tmp_path / "mine") in rundir.none_runs(tmp_path / "mine")
