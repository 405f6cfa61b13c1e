"""API keys at rest: a JSON file of digests, who each belongs to and what it may cost; and `octavo keys`.

A key is 256 random bits, shown once; the file has its SHA-256 only, which for a random key is as good as a slow
hash. The gateway sees changes of the file by itself.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Meta, Struct

FAILED = 1
PREFIX = "sk-octavo-"

Limit = Annotated[int, Meta(ge=1)]
File = Annotated[Path, Parameter(name="--file", help="the keys file (server.keys_file)")]


class KeysError(Exception):
    """A keys file that cannot be used."""


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. Limits are per minute; None is none."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, Meta(min_length=1, max_length=64)]
    """Whose it is. Tenants share no cached prefixes."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    admin: bool = False
    """May see what is not its own: metrics, what the server runs."""
    created: int = 0


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def load(path: Path) -> list[Key]:
    """The keys in a file. Raises `KeysError`."""
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=list[Key])
    except OSError as error:
        raise KeysError(f"the keys file {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KeysError(f"the keys file {path} is not valid: {error}") from error
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise KeysError(f"the keys file {path} has two keys of the same name")
    return keys


def save(path: Path, keys: list[Key]) -> None:
    """The file is the old or the new one at any time, and nobody else may read it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n")
    scratch.replace(path)


def new(
    name: str,
    /,
    *,
    file: File,
    tenant: str | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    admin: bool = False,
) -> int:
    """Make a key and print it: it cannot be shown again.

    Parameters
    ----------
    tenant
        whose it is; by default a tenant of the key's own name
    admin
        may also read metrics and what the server runs
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    try:
        keys = load(file) if file.exists() else []
        if any(key.name == name for key in keys):
            raise KeysError(f"there is a key {name!r} already")
        fields = {
            "name": name,
            "sha256": digest(secret),
            "tenant": tenant or name,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "admin": admin,
            "created": int(time.time()),
        }
        save(file, [*keys, msgspec.convert(fields, Key)])
    except (KeysError, msgspec.ValidationError, OSError) as error:
        return _failed(error)
    print(secret)
    return 0


def list_(*, file: File) -> int:
    """Show the keys, without what they are."""
    try:
        keys = load(file)
    except KeysError as error:
        return _failed(error)
    for key in keys:
        limits = [
            f"{value} {what}/min"
            for value, what in ((key.requests_per_minute, "requests"), (key.tokens_per_minute, "tokens"))
            if value is not None
        ]
        admin = ["admin"] if key.admin else []
        print(f"{key.name}\ttenant {key.tenant}\t{', '.join([*limits, *admin]) or 'no limits'}")
    return 0


def revoke(name: str, /, *, file: File) -> int:
    """Take a key out of the file: it is refused from its next request on."""
    try:
        keys = load(file)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise KeysError(f"there is no key {name!r}")
        save(file, left)
    except (KeysError, OSError) as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    print(f"octavo: {error}", file=sys.stderr)
    return FAILED


command = App(help="Make, list and revoke API keys.")
command.command(new)
command.command(list_, name="list")
command.command(revoke)
