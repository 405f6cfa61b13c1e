"""`octavo cache`: whose blocks are in the prefix tree of a running daemon, and how to empty it."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec

from octavo.core.client.client import PATIENCE_S, Client
from octavo.core.client.stream import ClientError, RequestRefused
from octavo.core.control import CacheState
from octavo.core.messages import Text
from octavo.core.rundir import RunInfo, find_run, none_runs


def show(run: Path | None, *, json: bool) -> int:
    """Print a line (or an object) for each tenant; 1 if no daemon answers."""

    async def ask(client: Client) -> None:
        state = await client.cache()
        print(_json(state) if json else "\n".join(_table(state)))

    return _connected(run, ask)


def flush(run: Path | None, tenant: str | None, prefix: str | None, *, json: bool) -> int:
    """Empty it, wholly or in part; 1 if no daemon answers."""

    async def ask(client: Client) -> None:
        ids = [] if prefix is None else await _ids(client, prefix)
        if prefix is not None and not ids:
            raise RequestRefused("prefix", "it is empty; without it all is flushed")
        state = await client.cache(flush=True, tenant=tenant, prefix=ids)
        if json:
            print(_json(state))
        else:
            left = sum(row.cached for row in state.tenants)
            host = f"; {state.from_host} are gone from host memory" if state.from_host else ""
            print(f"{state.freed} blocks are free, {state.in_use} when what uses them ends; {left} stay cached{host}")

    return _connected(run, ask)


async def _ids(client: Client, prefix: str) -> list[int]:
    """Token ids if it is a JSON list of them, else those of a plain prompt."""
    try:
        return msgspec.json.decode(prefix, type=list[int])
    except msgspec.MsgspecError:
        return await client.tokenize(Text(prefix))


def _connected(run: Path | None, ask: Callable[[Client], Awaitable[None]]) -> int:
    info = find_run(run)
    if info is None:
        print(f"octavo: {none_runs(run)}", file=sys.stderr)
        return 1
    try:
        anyio.run(_ask, info, ask)
    except ClientError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    return 0


async def _ask(info: RunInfo, ask: Callable[[Client], Awaitable[None]]) -> None:
    async with Client.connect(info) as client:
        await client.wait_ready(PATIENCE_S)
        await ask(client)


def _json(state: CacheState) -> str:
    told = {name: getattr(state, name) for name in ("total", "free", "used", "freed", "in_use", "from_host")}
    tenants = [{"tenant": row.tenant, "cached": row.cached, "used": row.used} for row in state.tenants]
    return msgspec.json.format(msgspec.json.encode({**told, "tenants": tenants})).decode()


def _table(state: CacheState) -> list[str]:
    rows = [("tenant", "cached", "of these in use")]
    rows += [(row.tenant or "(none)", str(row.cached), str(row.used)) for row in state.tenants]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{name:{widths[0]}}  {cached:>{widths[1]}}  {used:>{widths[2]}}" for name, cached, used in rows]
    return [*lines, f"{state.total} blocks: {state.free} free, {state.used} in use"]
