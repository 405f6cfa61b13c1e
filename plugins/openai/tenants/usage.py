"""`octavo usage`: what tenants and their keys have used."""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.core.cli import FAILED, Json, Run
from octavo.plugins.openai.tenants.command import File, file_of_keys
from octavo.plugins.openai.tenants.ledger import COUNTED, take_over, today
from octavo.plugins.openai.tenants.store import StoreError, connect

By = Literal["tenant", "key", "day"]

_GROUPS = {
    "tenant": ("key.tenant",),
    "key": ("key.tenant", "key.name", "usage.key"),
    "day": ("key.tenant", "usage.day"),
}
_SHOWN = {"tenant": 1, "key": 2, "day": 2}
"""How many of these are columns; a name may have been two keys'."""


def command(
    *,
    tenant: str | None = None,
    since: str | None = None,
    by: By = "tenant",
    file: File = None,
    run: Run = None,
    json: Json = False,
) -> int:
    """Show what has been used: requests by how they ended, prompt tokens (cached ones apart) and output tokens.

    Parameters
    ----------
    tenant
        of this one only
    since
        from this day on (UTC): 2026-11-30, or 7d for the last seven days
    by
        a line for each tenant, for each of its keys, or for each of its days
    """
    try:
        rows = report(file_of_keys(file, run), tenant, None if since is None else first_day(since, time.time()), by)
    except StoreError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    if json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        print("\n".join(_table(rows, by)))
    return 0


def report(path: Path, tenant: str | None = None, since: str | None = None, by: By = "tenant") -> list[dict[str, Any]]:
    """A row for each group; what gateways have noted within the last half second may be missing. Raises
    `StoreError`."""
    columns = _GROUPS[by]
    sums = ", ".join(f"SUM(usage.{name})" for name in COUNTED)
    query = (
        f"SELECT {', '.join(columns)}, {sums} FROM usage JOIN key ON key.id = usage.key "
        "WHERE (?1 IS NULL OR key.tenant = ?1) AND (?2 IS NULL OR usage.day >= ?2) "
        f"GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}"
    )
    connection = connect(path)
    try:
        take_over(connection, path)
        found = connection.execute(query, (tenant, since)).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"the file of keys {path} cannot be read: {error}") from error
    finally:
        connection.close()
    names = [column.partition(".")[2] for column in columns]
    names = ["key" if name == "name" else "id" if name == "key" else name for name in names]
    return [dict(zip((*names, *COUNTED), row, strict=True)) for row in found]


def first_day(text: str, now: float) -> str:
    """As the ledger writes days. Raises `StoreError`."""
    if (found := re.fullmatch(r"(\d{1,5})d", text)) is not None:
        return today(now - 86400 * max(0, int(found[1]) - 1))
    try:
        time.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise StoreError(
            f"--since {text!r} is neither a day such as 2026-11-30 nor a number of days such as 7d"
        ) from None
    return text


def _table(rows: list[dict[str, Any]], by: By) -> list[str]:
    """Aligned lines, the last one the sum."""
    if not rows:
        return ["nothing has been used"]
    heads = list(rows[0])[: _SHOWN[by]]
    total = [sum(row[name] for row in rows) for name in COUNTED]
    lines = [[*heads, *COUNTED], *([str(row[name]) for name in (*heads, *COUNTED)] for row in rows)]
    lines.append(["together", *[""] * (len(heads) - 1), *map(str, total)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    texts = len(heads)
    return [
        "  ".join(
            cell.ljust(w) if i < texts else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
