"""How much memory a process has, as the kernel counts it. Nothing of what it is used for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_FIELDS = {"VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "file", "VmHWM": "peak"}


class Memory(NamedTuple):
    """Bytes. `resident` is `anonymous` (its own), `file` (mapped, shared with the page cache) and shared memory; `peak`
    is the most that was ever resident."""

    resident: int = 0
    anonymous: int = 0
    file: int = 0
    peak: int = 0


def process_memory(pid: int | None = None) -> Memory | None:
    """Of this process, or of another; None if there is no such process (proc(5), status)."""
    try:
        text = Path(f"/proc/{'self' if pid is None else pid}/status").read_text()
    except OSError:
        return None
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(value.split()[0]) * 1024
    return Memory(**found)
