"""Policies that hang or take their process with them, as a package that daemons of a test find beside Octavo.

Nothing here may be imported by a test's own process but `installed`.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

import numpy as np

from octavo.policies.contract import Floats, Ints, Leaves, Running, Selection, Step, Waiting

ENTRIES = """
[octavo.batching]
loops = {module}:Loops
newest = {module}:Newest
raises = {module}:Raises
[octavo.chunking]
exits = {module}:Exits
[octavo.eviction]
hogs = {module}:Hogs
"""


class Loops:
    """Never returns, once somebody runs."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        while len(running):
            pass
        return Selection(np.arange(len(waiting), dtype=np.int32))


class Newest:
    """Harmless: the other way round than the default."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(np.arange(len(waiting), dtype=np.int32)[::-1])


class Raises:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        raise RuntimeError("not today")


class Exits:
    """Takes its process with it."""

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        os._exit(7)


class Hogs:
    """Never returns and lets no other thread run: not even a heartbeat is heard."""

    def rank(self, need: int, leaves: Leaves) -> Floats:
        re.match(r"(a+)+$", "a" * 60 + "b")
        raise AssertionError("sixty characters are enough for years")


def installed(folder: Path) -> dict[str, str]:
    """Put the policies into `folder`; the environment in which they are found."""
    module = "octavo_hostile_policies"
    (folder / f"{module}.py").write_text(inspect.getsource(sys.modules[__name__]))
    info = folder / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRIES.format(module=module))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
