"""The keys as the gateway holds them: those of the file as it was a moment ago."""

from __future__ import annotations

import hmac
import math
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from octavo.core.trace.log import log
from octavo.plugins.openai.tenants import keys
from octavo.plugins.openai.tenants.keys import Key
from octavo.plugins.openai.tenants.store import StoreError, connect

FRESH_S = 0.25
"""How long what was read counts as what is there."""

_INDEX = 16
"""Hexadecimal digits by which a key is looked up; the rest is compared in constant time."""
_NOBODY = "-" * 64

Weights = dict[str, float]


class KeyRing:
    """Looks into the file at most once in `FRESH_S`, and only while somebody asks."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `StoreError`."""
        self._path = path
        self._clock = clock
        self.on_weights: Callable[[Weights], None] | None = None
        """Told of the tenants' weights whenever they have changed."""
        self.weights: Weights = {}
        self._keys: dict[str, Key] = {}
        self._changes = -1
        self._read_at = -math.inf
        self._complaint = ""
        self._file = _file(path)
        self._connection = connect(path)
        try:
            self._read(self._connection)
        except sqlite3.Error as error:
            self._connection.close()
            raise StoreError(f"the file of keys {path} cannot be read: {error}") from error

    def find(self, secret: str) -> Key | None:
        """The key with this secret."""
        self.refresh()
        given = keys.digest(secret)
        key = self._keys.get(given[:_INDEX])
        known = _NOBODY if key is None else key.sha256
        return key if hmac.compare_digest(known, given) else None

    def holds(self, key: Key) -> bool:
        """Whether the key is still there."""
        self.refresh()
        found = self._keys.get(key.sha256[:_INDEX])
        return found is not None and found.sha256 == key.sha256

    def refresh(self) -> None:
        """A file that has become unusable changes nothing, but is complained of."""
        now = self._clock()
        if now - self._read_at < FRESH_S:
            return
        self._read_at = now
        try:
            if _file(self._path) != self._file:
                self._reopen()
            elif keys.changes(self._connection) != self._changes:
                self._read(self._connection)
            self._complaint = ""
        except (StoreError, sqlite3.Error) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log().error("the keys stay as they were", why=self._complaint)

    def close(self) -> None:
        self._connection.close()

    def _reopen(self) -> None:
        """Another file has taken its place."""
        fresh = connect(self._path)
        try:
            self._read(fresh)
        except BaseException:
            fresh.close()
            raise
        self._connection.close()
        self._connection, self._file = fresh, _file(self._path)

    def _read(self, connection: sqlite3.Connection) -> None:
        changes = keys.changes(connection)  # first: what comes meanwhile is read again
        found = {key.sha256[:_INDEX]: key for key in keys.all_keys(connection)}
        weights = keys.weights(connection)
        others = weights != self.weights
        self._changes, self._keys, self.weights = changes, found, weights
        if others and self.on_weights is not None:
            self.on_weights(weights)


def _file(path: Path) -> tuple[int, int]:
    """Which file it is."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_dev, status.st_ino)
