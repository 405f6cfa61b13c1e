"""Follows a run's trace as it is written, for figures of the last minute: only the lines that are asked for are parsed,
and whoever looks seldom reads only the newest part.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from octavo.core.trace.catalogue import Event
from octavo.core.trace.read import Line, parse

MOST_BYTES = 4 * 2**20
"""Of a file, read at a time: what lies further back is skipped."""


class Tail:
    """The new lines of some files of a run, of some kinds of events."""

    def __init__(self, run_dir: Path, files: tuple[str, ...], kinds: tuple[type[Event], ...]) -> None:
        """`files` are roles, as in the names of trace files."""
        self._paths = [run_dir / f"trace-{role}-0.jsonl" for role in files]
        self._marks = tuple(f'"event":"{kind.__struct_config__.tag}"'.encode() for kind in kinds)
        self._at: dict[Path, int] = {}

    def new(self) -> Iterator[Line]:
        """What was written since the last call, file after file; a line that is not whole yet comes the next time."""
        for path in self._paths:
            for text in self._lines(path):
                if any(mark in text for mark in self._marks):
                    try:
                        yield parse(text)
                    except msgspec.MsgspecError:
                        continue  # cut by the death of its process

    def _lines(self, path: Path) -> list[bytes]:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                start = min(self._at.get(path, 0), size)
                skipped = size - start > MOST_BYTES
                start = size - MOST_BYTES if skipped else start
                file.seek(start)
                data = file.read(size - start)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._at[path] = start + end
        lines = data[:end].splitlines()
        return lines[1:] if skipped else lines
