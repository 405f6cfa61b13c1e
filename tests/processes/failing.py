"""An executor that fails a step when it is told to, as a plugin that a daemon of a test finds beside Octavo."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

from octavo.core.config.schema import Config
from octavo.executors.ghost import GhostExecutor
from octavo.executors.residents import Run
from tests.fuzz.faulty import FaultyGhost

SIGN = "OCTAVO_TEST_SIGN"
"""The path of a file that says when."""
PATIENCE_S = 60.0


class Failing(FaultyGhost):
    """Its first run waits until the file is there, and fails."""

    @classmethod
    def load(cls, config: Config) -> Self:
        return cls(GhostExecutor.load(config).facts, _fails)


def _fails(run: Run) -> bool:
    sign, deadline = Path(os.environ[SIGN]), time.monotonic() + PATIENCE_S
    if sign.exists():
        return False
    while not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return True


def environment(folder: Path, root: Path) -> dict[str, str]:
    """The environment in which a daemon finds it as `executor.kind=failing`; `folder` is for what that takes."""
    info = folder / "octavo_failing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo_failing\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[octavo.executor]\nfailing = {__name__}:Failing\n")
    paths = [str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), SIGN: str(folder / "sign")}
