"""Files that take long to make, kept in the user's cache under a hash of everything they were made from.

Safe between processes: a file appears whole or not at all, and two that make the same one make the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_UNUSED_S = 30 * 24 * 3600


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo" / "kernels"


def digest(parts: Iterable[bytes]) -> str:
    """Of all parts; where one ends matters."""
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:32]


def stored(name: str, make: Callable[[Path], None], where: Path | None = None) -> Path:
    """The file of that name; when there is none, `make` is given a path to write it to."""
    where = where or folder()
    path = where / name
    if path.exists():
        os.utime(path)
        return path
    where.mkdir(parents=True, exist_ok=True)
    _sweep(where)
    with tempfile.TemporaryDirectory(dir=where, prefix="making-") as making:
        made = Path(making) / name
        make(made)
        made.replace(path)
    return path


def _sweep(where: Path) -> None:
    """Forget what nobody asked for in a month."""
    oldest = time.time() - _UNUSED_S
    for path in where.iterdir():
        try:
            if path.stat().st_mtime >= oldest:
                continue
            if path.is_dir():  # left by a process that was ended
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:  # another process was faster
            continue
