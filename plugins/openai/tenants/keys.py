"""API keys and tenants at rest: what is known of each, and the changes that can be made.

A key is 256 random bits, shown once; the file has its SHA-256 only, which for a random key is as good as a slow
hash. A revoked key stays in the file, for what it has used; its name is free again.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from octavo.plugins.openai.tenants.store import StoreError, transaction

PREFIX = "sk-octavo-"

INFER, READ, ADMIN = "infer", "read", "admin"
SCOPES = (INFER, READ, ADMIN)
"""What a key may be for: to generate, to look at how the service is, or everything."""

Limit = Annotated[int, Meta(ge=1, lt=1 << 53)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\s\x00-\x1f\x7f]+\Z")]


class Limits(Struct, frozen=True, kw_only=True):
    """What a key may ask for; None is no limit. `concurrency` is in answers at a time, `queue` in answers that wait."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Prompt and output together."""
    prompt_tokens_per_minute: Limit | None = None
    output_tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None
    queue: Annotated[int, Meta(ge=0, lt=1 << 53)] | None = None

    def given(self) -> dict[str, int]:
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}


LIMITS = Limits.__struct_fields__


class Key(Struct, frozen=True, kw_only=True):
    """One key. Times are in seconds since the epoch."""

    id: int
    name: str
    sha256: str
    tenant: str
    """Whose it is. Tenants share no cached prefixes."""
    scopes: frozenset[str]
    limits: Limits
    created: int
    expires: int | None = None
    revoked: int | None = None

    def may(self, needed: frozenset[str]) -> bool:
        """Whether one of these scopes is its, or it is an admin's."""
        return ADMIN in self.scopes or bool(needed & self.scopes)

    def expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


class Wanted(Struct, frozen=True, kw_only=True):
    """A key that is to be made."""

    name: Name
    tenant: Name
    scopes: Annotated[list[str], Meta(min_length=1)]
    limits: Limits = Limits()
    expires: int | None = None
    weight: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """The tenant's from now on; None leaves it."""


class _Old(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key in a file of JSON, as Octavo had them once."""

    name: Name
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Name
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    admin: bool = False
    created: int = 0


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def wanted(**fields: Any) -> Wanted:
    """Checked. Raises `StoreError`."""
    try:
        made = msgspec.convert(fields, Wanted)
    except msgspec.ValidationError as error:
        raise StoreError(f"this key cannot be made: {error}") from error
    if unknown := [scope for scope in made.scopes if scope not in SCOPES]:
        raise StoreError(f"there is no scope {unknown[0]!r}: there are {', '.join(SCOPES)}")
    if made.limits.queue is not None and made.limits.concurrency is None:
        raise StoreError("a queue is of those that wait for their turn: give --concurrency, too")
    return made


def create(connection: sqlite3.Connection, asked: Wanted, now: float) -> str:
    """Make the key; gives its secret, which is nowhere else. Raises `StoreError`."""
    secret = PREFIX + secrets.token_urlsafe(32)
    with transaction(connection):
        _insert(connection, asked, digest(secret), int(now))
        _changed(connection)
    return secret


def _insert(connection: sqlite3.Connection, asked: Wanted, sha256: str, created: int) -> None:
    connection.execute("INSERT INTO tenant (name) VALUES (?) ON CONFLICT DO NOTHING", (asked.tenant,))
    if asked.weight is not None:
        connection.execute("UPDATE tenant SET weight = ? WHERE name = ?", (asked.weight, asked.tenant))
    columns = ("name", "sha256", "tenant", "scopes", "created", "expires", *LIMITS)
    limits = [getattr(asked.limits, name) for name in LIMITS]
    values = (asked.name, sha256, asked.tenant, " ".join(sorted(set(asked.scopes))), created, asked.expires, *limits)
    marks = ", ".join("?" * len(columns))
    try:
        connection.execute(f"INSERT INTO key ({', '.join(columns)}) VALUES ({marks})", values)
    except sqlite3.IntegrityError as error:
        what = "this very key is there already" if "sha256" in str(error) else f"there is a key {asked.name!r} already"
        raise StoreError(f"{what}: revoke it, or take another name") from error


def revoke(connection: sqlite3.Connection, name: str, now: float) -> None:
    """Raises `StoreError` if there is no such key."""
    with transaction(connection):
        done = connection.execute(
            "UPDATE key SET revoked = ? WHERE name = ? AND revoked IS NULL", (int(now), name)
        ).rowcount
        if not done:
            raise StoreError(f"there is no key {name!r}: octavo keys list shows them")
        _changed(connection)


def weigh(connection: sqlite3.Connection, tenant: str, weight: float) -> None:
    """Raises `StoreError` if there is no such tenant, or the weight is none."""
    if not 0 < weight <= 1e6:
        raise StoreError(f"a weight is more than 0 and at most 1000000, not {weight:g}")
    with transaction(connection):
        if not connection.execute("UPDATE tenant SET weight = ? WHERE name = ?", (weight, tenant)).rowcount:
            raise StoreError(f"there is no tenant {tenant!r}: the first key of one makes it")
        _changed(connection)


def import_json(connection: sqlite3.Connection, path: Path) -> int:
    """Take over all keys of a file of JSON, or none; gives how many. Raises `StoreError`."""
    try:
        old = msgspec.json.decode(path.read_bytes(), type=list[_Old])
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is no keys file of JSON: {error}") from error
    with transaction(connection):
        for key in old:
            limits = Limits(requests_per_minute=key.requests_per_minute, tokens_per_minute=key.tokens_per_minute)
            scopes = [ADMIN] if key.admin else [INFER]
            asked = Wanted(name=key.name, tenant=key.tenant, scopes=scopes, limits=limits)
            _insert(connection, asked, key.sha256, key.created)
        _changed(connection)
    return len(old)


def all_keys(connection: sqlite3.Connection, *, revoked: bool = False) -> list[Key]:
    """In the order in which they were made; those that are revoked only if asked for."""
    fields = ("id", "name", "sha256", "tenant", "scopes", "created", "expires", "revoked")
    which = "" if revoked else "WHERE revoked IS NULL"
    rows = connection.execute(f"SELECT {', '.join((*fields, *LIMITS))} FROM key {which} ORDER BY id")
    return [_key(dict(zip((*fields, *LIMITS), row, strict=True))) for row in rows]


def _key(row: dict[str, Any]) -> Key:
    limits = Limits(**{name: row.pop(name) for name in LIMITS})
    return Key(**{**row, "scopes": frozenset(row["scopes"].split())}, limits=limits)


def weights(connection: sqlite3.Connection) -> dict[str, float]:
    """By tenant."""
    return dict(connection.execute("SELECT name, weight FROM tenant ORDER BY name"))


def changes(connection: sqlite3.Connection) -> int:
    """How often keys or tenants have changed."""
    (number,) = connection.execute("SELECT number FROM change").fetchone()
    return int(number)


def _changed(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE change SET number = number + 1")
