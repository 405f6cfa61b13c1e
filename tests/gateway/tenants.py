"""A gateway that wants keys, and the commands that make them."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import httpx

from octavo.core.cli import main
from octavo.core.config.schema import Config
from octavo.plugins.metrics.service import Metrics
from octavo.plugins.openai.app import build_app
from octavo.plugins.openai.tenants.account import Accounts

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def octavo(*words: str) -> None:
    assert main(words) == 0


def make(file: Path, name: str, *options: str) -> str:
    """A new key."""
    with redirect_stdout(io.StringIO()) as out:
        octavo("keys", "create", name, "--file", str(file), *options)
    return out.getvalue().strip()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def guarded(file: Path, engine: Any, clock: Clock) -> AsyncIterator[tuple[httpx.AsyncClient, Accounts]]:
    """Requests straight into the application; all time is `clock`'s."""
    accounts = Accounts(file, clock, clock)
    app = build_app(engine, Config(), Metrics.of_run(Path("nowhere")), accounts)
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=10
        ) as client:
            yield client, accounts
    finally:
        accounts.close()
