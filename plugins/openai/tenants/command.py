"""`octavo keys`: make, list and revoke API keys, in a file that a running gateway sees changes of by itself."""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from octavo.core.cli import FAILED, Json
from octavo.core.rundir import find_run, read_config
from octavo.plugins.openai.tenants import keys
from octavo.plugins.openai.tenants.keys import INFER, Key
from octavo.plugins.openai.tenants.store import StoreError, connect

File = Annotated[
    Path | None, Parameter(name="--file", help="the file of keys; by default that of the daemon that runs")
]
Scopes = Annotated[
    list[str] | None, Parameter(name="--scope", negative=(), help="infer (the default), read or admin; more than one")
]

_UNITS = {"m": 60, "h": 3600, "d": 86400}


def create(
    name: str,
    /,
    *,
    file: File = None,
    tenant: str | None = None,
    weight: float | None = None,
    scope: Scopes = None,
    expires: str | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    prompt_tokens_per_minute: int | None = None,
    output_tokens_per_minute: int | None = None,
    concurrency: int | None = None,
    queue: int | None = None,
) -> int:
    """Make a key and print it: it cannot be shown again.

    Parameters
    ----------
    tenant
        whose it is; by default a tenant of the key's own name
    weight
        the tenant's share under the policies fair and tenant-quota; 1 unless it was ever set
    expires
        when it ends: 90d, 12h, 30m from now, or a date such as 2027-01-31
    tokens_per_minute
        prompt and output together
    concurrency
        answers at a time; a request for several prompts counts as so many
    queue
        requests that may wait for their turn; 0 unless given
    """

    def make() -> None:
        limits = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "prompt_tokens_per_minute": prompt_tokens_per_minute,
            "output_tokens_per_minute": output_tokens_per_minute,
            "concurrency": concurrency,
            "queue": queue,
        }
        now = time.time()
        ends = None if expires is None else _end(expires, now)
        asked = keys.wanted(
            name=name, tenant=tenant or name, scopes=scope or [INFER], limits=limits, expires=ends, weight=weight
        )
        print(_with(file, lambda store: keys.create(store, asked, now), create=True))

    return _told(make)


def list_(
    *, file: File = None, all_: Annotated[bool, Parameter(name="--all", negative=())] = False, json: Json = False
) -> int:
    """Show the keys, without what they are.

    Parameters
    ----------
    all_
        also those that are revoked
    """

    def show() -> None:
        found, weights = _with(file, lambda store: (keys.all_keys(store, revoked=all_), keys.weights(store)))
        rows = [_row(key, weights[key.tenant]) for key in found]
        if json:
            print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        else:
            print("\n".join(_line(row) for row in rows) or "no keys")

    return _told(show)


def revoke(name: str, /, *, file: File = None) -> int:
    """Take a key back: it is refused from now on."""
    return _told(lambda: _with(file, lambda store: keys.revoke(store, name, time.time())))


def weigh(tenant: str, weight: float, /, *, file: File = None) -> int:
    """Set a tenant's share under the policies fair and tenant-quota.

    Parameters
    ----------
    weight
        its share, in relation to the others'; everybody else has 1
    """
    return _told(lambda: _with(file, lambda store: keys.weigh(store, tenant, weight)))


def import_(old: Path, /, *, file: Path) -> int:
    """Take over the keys of a JSON file, as Octavo had them once. They stay what they are.

    Parameters
    ----------
    old
        the JSON file; it is not changed
    file
        the file of keys they go into; it is made if need be
    """

    def take() -> None:
        number = _with(file, lambda store: keys.import_json(store, old), create=True)
        print(f"{number} keys are in {file}: set server.keys_file={file}")

    return _told(take)


def file_of_keys(file: Path | None, run: Path | None = None) -> Path:
    """The one named, or that of the daemon that runs. Raises `StoreError`."""
    if file is not None:
        return file
    info = find_run(run)
    known = None if info is None else read_config(info.path).server.keys_file
    if known is None:
        what = "no daemon is running" if info is None else "the daemon that runs has no server.keys_file"
        raise StoreError(f"{what}: name the file of keys with --file")
    return Path(known)


def _with(file: Path | None, do: Callable[[sqlite3.Connection], Any], *, create: bool = False) -> Any:
    path = file_of_keys(file)
    connection = connect(path, create=create)
    try:
        return do(connection)
    except sqlite3.Error as error:
        raise StoreError(f"the file of keys {path} cannot be used: {error}") from error
    finally:
        connection.close()


def _told(do: Callable[[], Any]) -> int:
    try:
        do()
    except StoreError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    return 0


def _end(text: str, now: float) -> int:
    """Seconds since the epoch. Raises `StoreError`."""
    if (found := re.fullmatch(r"(\d{1,6})([mhd])", text)) is not None:
        return int(now) + int(found[1]) * _UNITS[found[2]]
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        raise StoreError(f"--expires {text!r} is neither a time from now (90d, 12h, 30m) nor a date") from None
    at = int((end if end.tzinfo is not None else end.replace(tzinfo=UTC)).timestamp())
    if at <= now:
        raise StoreError(f"--expires {text!r} is past already")
    return at


def _row(key: Key, weight: float) -> dict[str, Any]:
    return {
        "name": key.name,
        "tenant": key.tenant,
        "weight": weight,
        "scopes": [scope for scope in keys.SCOPES if scope in key.scopes],
        "limits": key.limits.given(),
        "created": _date(key.created),
        "expires": _date(key.expires),
        "revoked": _date(key.revoked),
    }


def _line(row: dict[str, Any]) -> str:
    limits = ", ".join(f"{name}={value}" for name, value in row["limits"].items()) or "no limits"
    parts = [row["name"], f"tenant {row['tenant']} (weight {row['weight']:g})", " ".join(row["scopes"]), limits]
    parts += [f"{what} {row[what]}" for what in ("expires", "revoked") if row[what]]
    return "\t".join(parts)


def _date(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


command = App(help="Make, list and revoke API keys.")
command.command(create)
command.command(list_, name="list")
command.command(revoke)
command.command(weigh)
command.command(import_, name="import")
