"""One mixed load on a real daemon, for all tests that read its trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo.core.trace.read import records
from octavo.core.trace.run import Run
from tests.processes.daemon import daemon
from tests.trace.load import Seen, mixed_load

REQUESTS = 300


class Loaded(NamedTuple):
    """A finished run: its folder, its trace, and what its client saw."""

    path: Path
    run: Run
    seen: dict[str, Seen]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    kept = tmp_path_factory.mktemp("run")
    with daemon("kv.tokens=2048", "scheduler.max_sequences=16") as running:
        seen = mixed_load(running, REQUESTS)
        for path in running.run_dir.glob("*.json*"):
            shutil.copy(path, kept)
    return Loaded(kept, Run(records(kept)), seen)
