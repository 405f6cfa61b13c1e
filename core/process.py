"""The first code of a child process: tie it to its supervisor, name it, then run its role.

    python -m octavo.core.process kv --run DIR --generation 3 --parent 4711

A child never outlives its supervisor: the kernel kills it when its parent dies, and should that be missed, it ends
when its standard input does. Roles of the kernel are modules here; the executor and the gateway are entry points.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

import setproctitle

from octavo.core.config.schema import Config
from octavo.core.messages import Role
from octavo.core.models.errors import ModelError
from octavo.core.plugins import PluginError, resolve
from octavo.core.rundir import read_config
from octavo.core.trace.log import configure_log, log

Run = Callable[[Config, Path, int], None]
"""What a role is: `run(config, run_dir, generation)`, until the supervisor says Shutdown."""

KERNEL_ROLES = {
    Role.TOKENIZER: "octavo.core.tokenizer.actor",
    Role.SCHEDULER: "octavo.core.scheduler.actor",
    Role.KV: "octavo.core.kv.actor",
}

EXPLAINED = (ModelError, PluginError, OSError)
"""Errors about the world, not about us: their text says it all, and a traceback would hide it."""

PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="octavo.core.process")
    parser.add_argument("role", type=lambda name: Role[name.upper()])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    role: Role = arguments.role
    tie_to_parent(arguments.parent)
    name = role.name.lower()
    setproctitle.setproctitle(f"octavo: {name}")
    config = read_config(arguments.run)
    configure_log(name, config.trace.level)
    try:
        find_role(role)(config, arguments.run, arguments.generation)
    except Exception as error:  # noqa: BLE001 - the edge of the process: its last words, then it dies as it must
        own_fault = not isinstance(error, EXPLAINED)
        log().error(f"{type(error).__name__}: {error}", exc_info=error if own_fault else None)
        os._exit(1)


def find_role(role: Role) -> Run:
    """`PluginError` or ImportError where a role is not installed."""
    match role:
        case Role.EXECUTOR:
            return cast(Run, resolve("octavo.actor", "executor"))
        case Role.GATEWAY:
            return cast(Run, resolve("octavo.gateway", "openai"))
        case _:
            return cast(Run, import_module(KERNEL_ROLES[role]).run)


def tie_to_parent(parent: int) -> None:
    """SIGKILL when the parent dies; at once if it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_until_eof, name="parent", daemon=True).start()


def _until_eof() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
