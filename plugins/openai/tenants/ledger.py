"""What keys have used, by day (UTC): written into the file of keys off the request's path, in batches.

    record ─▶ a line in a journal beside the file (a `write`, no waiting) ─▶ every half second SQLite, one transaction

A gateway that is killed loses nothing: a line is written before the last byte of its answer is, and the kernel keeps
it. Whoever opens the ledger next, a gateway or `octavo usage`, takes over the journals that no living process holds.
Each line counts once: how much of a journal has been counted is written in the same transaction as the counts. When the
power fails, up to half a second of lines may be lost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import anyio
import msgspec
from msgspec import Meta, Struct

from octavo.core.trace.log import log
from octavo.plugins.openai.tenants.store import connect, transaction

Outcome: TypeAlias = Literal["finished", "cancelled", "refused", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""How a request ended: with its whole answer, left by its client, not served, or by a fault of the service."""
TOKENS = ("prompt", "cached", "output")
COUNTED = (*OUTCOMES, *TOKENS)
BATCH_S = 0.5
LONGEST = 1 << 20
"""Bytes; a journal that is longer, and counted, is replaced by a new one."""

_ADD = (
    f"INSERT INTO usage (key, day, {', '.join(COUNTED)}) VALUES (?, ?, {', '.join('?' * len(COUNTED))}) "
    f"ON CONFLICT DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in COUNTED)}"
)


Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Entry(Struct, array_like=True, frozen=True):
    """One request of a key, ended."""

    key: Count
    day: str
    outcome: Outcome
    prompt: Count
    cached: Count
    output: Count


Counts = dict[tuple[int, str], list[int]]
"""By key and day, a number for each of `COUNTED`."""


def today(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))


class Ledger:
    """Of one gateway. `record` from its event loop, `flush` from any thread."""

    def __init__(self, path: Path) -> None:
        """Raises `StoreError`, or OSError if there is no room for a journal beside the file."""
        self._path = path
        self._connection = connect(path)
        try:
            take_over(self._connection, path)
        except sqlite3.Error as error:  # their journals stay, for whoever is next
            log().error("usage of former gateways is not counted yet", why=str(error))
        self._lock = threading.Lock()
        """Held to write a line and to take what was written, never while SQLite works."""
        self._flushing = threading.Lock()
        self._pending: Counts = defaultdict(_nothing)
        self._journal = _Journal(path)

    def record(self, entry: Entry) -> None:
        """Kept when this returns, whatever happens to the process."""
        line = msgspec.json.encode(entry) + b"\n"
        with self._lock:
            _count(self._pending, [entry])
            try:
                self._journal.write(line)
            except OSError as error:  # a full disk: what is in memory will be counted all the same
                log().error("a line of usage is only in memory", why=str(error))

    def flush(self) -> None:
        """Count what has been recorded. What cannot be counted now is counted by a later call."""
        with self._flushing:
            with self._lock:
                counts, self._pending = self._pending, defaultdict(_nothing)
                journal, upto = self._journal, self._journal.size
            if not counts:
                return
            try:
                _add(self._connection, counts, journal.path.name, upto)
            except sqlite3.Error as error:
                log().error("usage is not counted yet", why=str(error))
                with self._lock:
                    for where, numbers in counts.items():
                        self._pending[where] = [a + b for a, b in zip(self._pending[where], numbers, strict=True)]
                return
            if upto > LONGEST:
                try:
                    self._replace(upto)
                except OSError as error:  # no room for another one: this one goes on
                    log().error("a long journal of usage stays in use", why=str(error))

    async def run(self) -> None:
        """Flush now and then, for ever."""
        while True:
            await anyio.sleep(BATCH_S)
            await anyio.to_thread.run_sync(self.flush)

    def close(self) -> None:
        self.flush()
        with self._lock:
            left = bool(self._pending)
        self._journal.close(keep=left)
        if not left:
            self._forget(self._journal)
        self._connection.close()

    def _replace(self, counted: int) -> None:
        """By a new journal, if all that is in this one is counted."""
        fresh = _Journal(self._path)
        with self._lock:
            old = fresh
            if self._journal.size == counted:
                old, self._journal = self._journal, fresh
        old.close(keep=False)
        self._forget(old)

    def _forget(self, journal: _Journal) -> None:
        with suppress(sqlite3.Error):  # a row without its journal says nothing
            self._connection.execute("DELETE FROM journal WHERE name = ?", (journal.path.name,))


class _Journal:
    """A file that its process holds locked for as long as it lives."""

    def __init__(self, store: Path) -> None:
        name = f"{store.name}-usage-{secrets.token_hex(6)}"
        scratch = store.with_name(f".{name}")
        self.path = store.with_name(name)
        self._file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        scratch.rename(self.path)  # nobody finds it before it is locked
        self.size = 0
        self._cut = False
        """The last line has no end: the disk was full."""

    def write(self, line: bytes) -> None:
        """Raises OSError; of a line that does not fit, only itself is lost."""
        line = b"\n" + line if self._cut else line
        written = os.write(self._file, line)
        self.size += written
        self._cut = written < len(line)
        if self._cut:
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes could be written")

    def close(self, *, keep: bool) -> None:
        if not keep:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def take_over(connection: sqlite3.Connection, store: Path) -> None:
    """Count what dead gateways have left."""
    for path in sorted(store.parent.glob(f"{escape(store.name)}-usage-*")):
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its gateway lives
            if not path.exists():
                continue  # somebody else was faster
            begin = _counted(connection, path.name)
            data = file.read()
            counts: Counts = defaultdict(_nothing)
            _count(counts, _entries(data[begin:]))
            _add(connection, counts, path.name, len(data))
            path.unlink()
            connection.execute("DELETE FROM journal WHERE name = ?", (path.name,))


def _entries(data: bytes) -> Iterator[Entry]:
    """A line that was cut is none."""
    for line in data.splitlines():
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=Entry)


def _nothing() -> list[int]:
    return [0] * len(COUNTED)


def _count(counts: Counts, entries: Iterable[Entry]) -> None:
    for entry in entries:
        numbers = counts[entry.key, entry.day]
        numbers[OUTCOMES.index(entry.outcome)] += 1
        for i, n in enumerate((entry.prompt, entry.cached, entry.output), len(OUTCOMES)):
            numbers[i] += n


def _add(connection: sqlite3.Connection, counts: Counts, journal: str, upto: int) -> None:
    with transaction(connection):
        connection.executemany(_ADD, [(*where, *numbers) for where, numbers in counts.items()])
        connection.execute(
            "INSERT INTO journal VALUES (?, ?) ON CONFLICT DO UPDATE SET applied = excluded.applied", (journal, upto)
        )


def _counted(connection: sqlite3.Connection, journal: str) -> int:
    row = connection.execute("SELECT applied FROM journal WHERE name = ?", (journal,)).fetchone()
    return 0 if row is None else int(row[0])
