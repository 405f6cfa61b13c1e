"""The folder of one run of the daemon: where it lies, what is in it, and how others find a running one.

    <base>/<run id>/daemon.json      pid, address, model: written first, 0600
                    config.json      the effective document, for the actors
                    control, <role>-<replica>.<generation>, client-<name>      sockets
                    trace-<role>-<replica>.jsonl

Knows nothing of what runs in it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.config.schema import Config

KEPT_RUNS = 5
"""Folders of finished runs that are kept for their traces; those of starts that failed are the first to go."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """daemon.json. `address` is the HTTP server's, None without one. `started` is in seconds since the epoch. `ready`
    says that it could serve at some time, not that it can now."""

    pid: int
    birth: int
    """When the kernel started that process, in its own clock ticks: a later process may have the same pid."""
    started: float
    model: str
    address: str | None
    run_dir: str
    ready: bool = False

    @property
    def path(self) -> Path:
        return Path(self.run_dir)

    def alive(self) -> bool:
        """Whether the daemon still runs (its folder may outlive it)."""
        return process_birth(self.pid) == self.birth


def process_birth(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None if there is none, or it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state == "Z" else int(fields[18])


def base() -> Path:
    """Where runs without a configured folder live: short, private to the user, gone after a reboot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "octavo"
    return Path("/tmp") / f"octavo-{os.getuid()}"


def create(config: Config) -> Path:
    """The folder for a new run, mode 0700. Sweeps what finished runs left behind.

    Raises FileExistsError if the configured folder is in use by a running daemon.
    """
    if config.run_dir is not None:
        path = Path(config.run_dir).absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        holder = read(path)
        if holder is not None and holder.alive():
            raise FileExistsError(f"run_dir {path} is in use by the daemon with pid {holder.pid}")
        remove_sockets(path)
    else:
        parent = base()
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{parent} belongs to another user: set run_dir to a folder of your own")
        sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=time.strftime("%m%d-%H%M%S-"), dir=parent))
    path.chmod(0o700)
    return path


def write(path: Path, config: Config, *, model: str, pid: int) -> RunInfo:
    """Leave word of a run that starts."""
    address = f"http://{config.server.host}:{config.server.port}" if config.server.enabled else None
    info = RunInfo(
        pid=pid,
        birth=process_birth(pid) or 0,
        started=time.time(),
        model=model,
        address=address,
        run_dir=str(path),
    )
    _private(path / "config.json", msgspec.json.format(msgspec.json.encode(config)))
    _private(path / "daemon.json", msgspec.json.format(msgspec.json.encode(info)))
    return info


def abandon(path: Path, config: Config) -> None:
    """No word could be left of the run: no sweep would know that nobody is in its folder."""
    if config.run_dir is None:
        shutil.rmtree(path, ignore_errors=True)


def relocate(path: Path, address: str) -> None:
    """The HTTP server listens here: with port 0 only it knows."""
    _amend(path, address=address)


def served(path: Path) -> None:
    """The run became ready: its trace is worth more than that of a start that failed."""
    _amend(path, ready=True)


def _amend(path: Path, **fields: Any) -> None:
    info = read(path)
    if info is not None:
        amended = msgspec.structs.replace(info, **fields)
        _private(path / "daemon.json", msgspec.json.format(msgspec.json.encode(amended)))


def _private(path: Path, data: bytes) -> None:
    """Written whole or not at all: readers look at any time."""
    scratch = path.with_suffix(".new")
    scratch.touch(mode=0o600)
    scratch.write_bytes(data)
    scratch.replace(path)


def read(path: Path) -> RunInfo | None:
    """What daemon.json says, or None where there is no (readable) one."""
    try:
        return msgspec.json.decode((path / "daemon.json").read_bytes(), type=RunInfo)
    except (OSError, msgspec.MsgspecError):
        return None


def read_config(path: Path) -> Config:
    return msgspec.json.decode((path / "config.json").read_bytes(), type=Config)


def runs() -> list[RunInfo]:
    """All runs under the common base, newest first, finished ones too, and starts that failed."""
    parent = base()
    found = [read(path) for path in parent.iterdir()] if parent.is_dir() else []
    return sorted((info for info in found if info is not None), key=lambda info: info.started, reverse=True)


def find_run(path: Path | None = None) -> RunInfo | None:
    """The running daemon in `path`, or the one started last; None if none runs."""
    candidates = runs() if path is None else [read(path)]
    return next((info for info in candidates if info is not None and info.alive()), None)


def none_runs(path: Path | None) -> str:
    """What is said where `find_run` finds none."""
    if path is not None:
        return f"no daemon runs in {path}"
    return f"no daemon runs in {base()}; if yours has another run_dir, name it with --run"


def remove_sockets(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_socket():
            entry.unlink(missing_ok=True)


def sweep(parent: Path) -> None:
    """Remove the folders of dead daemons, but for the newest few, whose traces may still be read."""
    dead = [info for path in parent.iterdir() if (info := read(path)) is not None and not info.alive()]
    dead.sort(key=lambda info: (info.ready, info.started), reverse=True)
    for info in dead[:KEPT_RUNS]:
        remove_sockets(info.path)
    for info in dead[KEPT_RUNS:]:
        shutil.rmtree(info.path, ignore_errors=True)
