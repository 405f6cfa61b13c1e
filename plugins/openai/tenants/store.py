"""The file of keys and of what they have used: its tables, and how it is opened.

SQLite in WAL mode: whoever reads waits for nobody, so commands change it under a running gateway. Nobody but its owner
may read it. `change.number` grows with every change of keys and tenants, not with usage: by it a gateway sees
cheaply that there is something new.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

APPLICATION = 0x4F637476
VERSION = 1
BUSY_S = 5.0
"""How long a writer waits for another one."""

_SCHEMA = """
CREATE TABLE change (number INTEGER NOT NULL) STRICT;
INSERT INTO change VALUES (0);
CREATE TABLE tenant (name TEXT PRIMARY KEY, weight REAL NOT NULL DEFAULT 1) STRICT;
CREATE TABLE key (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    sha256 TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL REFERENCES tenant (name),
    scopes TEXT NOT NULL,
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    prompt_tokens_per_minute INTEGER,
    output_tokens_per_minute INTEGER,
    concurrency INTEGER,
    queue INTEGER,
    created INTEGER NOT NULL,
    expires INTEGER,
    revoked INTEGER
) STRICT;
CREATE UNIQUE INDEX one_of_a_name ON key (name) WHERE revoked IS NULL;
CREATE TABLE usage (
    key INTEGER NOT NULL,
    day TEXT NOT NULL,
    finished INTEGER NOT NULL,
    cancelled INTEGER NOT NULL,
    refused INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    prompt INTEGER NOT NULL,
    cached INTEGER NOT NULL,
    output INTEGER NOT NULL,
    PRIMARY KEY (key, day)
) STRICT;
CREATE TABLE journal (name TEXT PRIMARY KEY, applied INTEGER NOT NULL) STRICT;
"""


class StoreError(Exception):
    """A file of keys that cannot be used; the message says what to do."""


def connect(path: Path, *, create: bool = False) -> sqlite3.Connection:
    """The file, open; statements outside of `transaction` commit by themselves. Raises `StoreError`.

    A file of SQLite's is never opened by other means: to close it would give up the locks of this process's other
    connections (POSIX has one set for all), and the next process to end would take the log beside it away from them."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        if not create:
            raise StoreError(f"there is no file of keys {path}: octavo keys create NAME --file {path}") from None
        size = 0
    except OSError as error:
        raise StoreError(f"the file of keys {path} cannot be read: {error.strerror}") from error
    if not size and not create:
        raise StoreError(_other(path, b""))
    try:
        if not size:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the file of keys {path} cannot be opened: {error}") from error
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _other(path: Path, head: bytes) -> str:
    if head.lstrip()[:1] in (b"[", b"{"):
        new = path.with_suffix(".db")
        return (
            f"{path} is a keys file of JSON, as Octavo had them once: octavo keys import {path} --file {new}, "
            f"then set server.keys_file={new}; its keys stay as they are"
        )
    return f"{path} is no file of keys: octavo keys create NAME --file FILE makes one"


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        if not _pragma(connection, "user_version"):
            with transaction(connection):
                if not connection.execute("SELECT 1 FROM sqlite_schema").fetchone():  # nobody was faster
                    for statement in _SCHEMA.split(";\n"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {APPLICATION}")
                    connection.execute(f"PRAGMA user_version = {VERSION}")
        if _pragma(connection, "application_id") != APPLICATION:
            raise StoreError(_other(path, b""))
        if (version := _pragma(connection, "user_version")) != VERSION:
            raise StoreError(f"{path} is a file of keys of version {version}; this Octavo has {VERSION}")
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            raise StoreError(_other(path, _head(path))) from error
        raise StoreError(f"the file of keys {path} cannot be used: {error}") from error


def _head(path: Path) -> bytes:
    """The beginning of what is no file of SQLite's."""
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError:
        return b""


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite has not ended it itself, as it does when the disk is full
            connection.execute("ROLLBACK")
        raise
