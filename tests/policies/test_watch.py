"""The file that tells which policy a process is asking, also when the disk has no room for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from octavo.core.messages import Role
from octavo.core.policy.watch import GROUPS, Asked, AskedFile, read_asked

NAMES = dict.fromkeys(GROUPS, "mine")

ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from octavo.core.messages import Role
from octavo.core.policy.watch import GROUPS, AskedFile

resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
watch = AskedFile(Path(sys.argv[1]), Role.KV)
watch.named(dict.fromkeys(GROUPS, "mine"))
watch.begins("eviction")
"""


def test_who_has_the_word_is_known_from_outside_while_it_has_it(tmp_path: Path) -> None:
    watch = AskedFile(tmp_path, Role.KV)
    watch.named(NAMES)
    watch.begins("eviction")
    assert read_asked(tmp_path, Role.KV) == Asked("eviction", "mine")
    watch.ends()
    assert read_asked(tmp_path, Role.KV) is None


def test_on_a_full_disk_a_process_starts_and_nobody_knows_whom_it_asks(tmp_path: Path) -> None:
    """A bound of the file's size stands for the disk's."""
    ran = subprocess.run([sys.executable, "-c", ON_A_FULL_DISK, tmp_path], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert read_asked(tmp_path, Role.KV) is None
