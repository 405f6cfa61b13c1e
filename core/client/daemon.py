"""A daemon of one's own: started for a script or a chat, and gone when they are.

Run as a module it is the daemon's first code: it ties the process to the one that wanted it, then becomes
`octavo serve`. So even when a script is killed outright, the daemon gets its SIGTERM and drains.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from octavo.core import rundir
from octavo.core.client.stream import ServiceUnavailable

PR_SET_PDEATHSIG = 1
TAIL_LINES = 20
BORN_S = 60.0
"""How long the daemon may take to leave its first word in the run folder: it has not loaded anything then."""
GENTLE_S = 35.0
"""How long it may take to end when asked once; a little more than it drains by default."""
PATIENCE_S = 10.0
"""The same when asked again."""
POLL_S = 0.02


class Daemon:
    """`octavo serve` with `arguments`, without HTTP, in a run folder of its own.

    Make it in a thread that lives as long as the daemon is to live: the kernel ends it with that thread.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        # Not beside the other runs: nobody else shall find this daemon and join it.
        parent = rundir.base() / "own"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rundir.sweep(parent)
        self.run_dir = Path(tempfile.mkdtemp(dir=parent))
        self._log = self.run_dir / "daemon.log"
        settings = ["--set", "server.enabled=false", "--set", f'run_dir="{self.run_dir}"']
        command = [sys.executable, "-m", __name__, str(os.getpid()), "serve", *arguments, *settings]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    async def born(self) -> None:
        """Wait until it can be connected to. Raises `ServiceUnavailable` with its own words if it ends first."""
        with anyio.move_on_after(BORN_S):
            while rundir.read(self.run_dir) is None:
                if self._process.poll() is not None:
                    raise self.failure(f"the daemon ended with exit code {self._process.returncode}")
                await anyio.sleep(POLL_S)
            return
        raise self.failure(f"the daemon did not begin within {BORN_S:g} s")

    def failure(self, what: str) -> ServiceUnavailable:
        """`what`, and the last lines that the daemon wrote."""
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return ServiceUnavailable("\n  ".join([f"{what}:", *lines]) if lines else what)

    async def stop(self) -> None:
        """Ask it to end, insist, and remove what it left if it never ran."""
        for request, patience_s in (
            (signal.SIGTERM, GENTLE_S),
            (signal.SIGTERM, PATIENCE_S),
            (signal.SIGKILL, PATIENCE_S),
        ):
            if self._process.poll() is None:
                self._process.send_signal(request)
                with anyio.move_on_after(patience_s):
                    while self._process.poll() is None:
                        await anyio.sleep(POLL_S)
        if rundir.read(self.run_dir) is None:
            shutil.rmtree(self.run_dir, ignore_errors=True)


def main() -> int:
    """`python -m octavo.core.client.daemon PARENT serve …`."""
    from octavo.core import cli

    parent, *arguments = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        return 1
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
