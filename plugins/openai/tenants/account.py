"""One request of a key: what it may still ask for, whose turn it is, and what it has used."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from octavo.plugins.openai.tenants.keyring import KeyRing
from octavo.plugins.openai.tenants.keys import Key
from octavo.plugins.openai.tenants.ledger import Entry, Ledger, Outcome, today
from octavo.plugins.openai.tenants.limits import Allowance
from octavo.plugins.openai.tenants.turns import NoTurn, Turns

SOON_S = 1
"""When to come again for a turn: nobody knows how long answers take."""


class Limited(Exception):
    """A limit of the key forbids it now."""

    def __init__(self, message: str, limit: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class Withdrawn(Exception):
    """The key is good no longer: its answers end. `code` is as for a request that comes with it now."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Accounts:
    """All keys of a file, and what they have left."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        """Raises `StoreError`, or OSError."""
        self.ring = KeyRing(path, clock)
        try:
            self.ledger = Ledger(path)
        except BaseException:
            self.ring.close()
            raise
        self.clock = clock
        self.wall = wall
        self._used: dict[str, tuple[Allowance, Turns]] = {}
        """By key (its digest: in another file the number is another's), those that have been used here."""

    def find(self, secret: str) -> Key | None:
        return self.ring.find(secret)

    def open(self, key: Key) -> Account:
        """For one request."""
        if (used := self._used.get(key.sha256)) is None:
            allowance = Allowance(key.limits, self.clock())
            used = self._used[key.sha256] = allowance, Turns(key.limits.concurrency, key.limits.queue or 0)
        return Account(self, key, *used)

    def close(self) -> None:
        self.ledger.close()
        self.ring.close()


class Account:
    """The key's, for one request; ended once."""

    def __init__(self, accounts: Accounts, key: Key, allowance: Allowance, turns: Turns) -> None:
        self.key = key
        self._accounts = accounts
        self._allowance = allowance
        self._turns = turns
        self.ended = False

    def take_request(self) -> None:
        """Raises `Limited`."""
        refused = self._allowance.take_request(self._accounts.clock())
        if refused is not None:
            limit, wait = refused
            most = self.key.limits.given()[limit]
            message = f"this key's {limit} ({most}) are used up; the next request can come in {wait:.1f} s"
            raise Limited(message, limit, math.ceil(wait))

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """To give an answer that counts as `size`. Raises `Limited`."""
        try:
            async with self._turns.turn(size):
                yield
        except NoTurn as error:
            given = f"{self._turns.running} answers are being given and {self._turns.waiting} requests wait"
            message = f"this key's {error.limit} ({error.most}) is used up: {given}"
            raise Limited(message, error.limit, SOON_S) from error

    def check(self) -> None:
        """Asked while an answer is given. Raises `Withdrawn`."""
        name = self.key.name
        if not self._accounts.ring.holds(self.key):
            raise Withdrawn(f"the API key {name!r} was revoked while this was answered", "invalid_api_key")
        if self.key.expired(self._accounts.wall()):
            raise Withdrawn(f"the API key {name!r} expired while this was answered", "expired_api_key")

    def spend(self, prompt: int = 0, output: int = 0) -> None:
        """Tokens, as they come."""
        self._allowance.spend(prompt, output, self._accounts.clock())

    def end(self, outcome: Outcome, prompt: int = 0, cached: int = 0, output: int = 0) -> None:
        """Note what the request has used; only the first word counts."""
        if not self.ended:
            self.ended = True
            day = today(self._accounts.wall())
            self._accounts.ledger.record(Entry(self.key.id, day, outcome, prompt, cached, output))

    def headers(self) -> dict[str, str]:
        return self._allowance.headers()
