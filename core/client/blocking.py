"""The client for code that is not asynchronous: an event loop in a thread of its own, and calls into it.

Joins a running daemon, or starts one around itself. What `octavo.LLM`, `octavo chat` and `octavo batch` are made of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from octavo.core.client.client import Client
from octavo.core.client.daemon import Daemon
from octavo.core.client.stream import Piece, ServiceUnavailable, Stream
from octavo.core.messages import Facts, Params, Prompt
from octavo.core.rundir import find_run, none_runs

T = TypeVar("T")

START_S = 600.0
"""How long a daemon may take until it is ready; a large model is read from disk in this time."""


class BlockingClient:
    """Connected when it is made, and the model is ready. Use it as a context manager, or `close` it.

    `run` is the folder of a running daemon; without one, a daemon is started with `arguments` of `octavo serve`.
    Raises `ServiceUnavailable` (with the daemon's last words) if the service does not get ready.
    """

    def __init__(self, run: Path | None, arguments: Sequence[str] = (), start_timeout_s: float = START_S) -> None:
        with ExitStack() as stack:
            self._portal: BlockingPortal = stack.enter_context(start_blocking_portal("asyncio"))
            connection = _connect(run) if run is not None else _start(arguments, start_timeout_s)
            self.client: Client = stack.enter_context(self._portal.wrap_async_context_manager(connection))
            self.facts: Facts = self.call(lambda: self.client.wait_ready(start_timeout_s))
            self._stack = stack.pop_all()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function in the event loop; an interrupt here cancels it there."""
        future = self._portal.start_task_soon(function)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def pieces(self, prompt: Prompt, params: Params) -> Generator[Piece, None, None]:
        """Stream one request; leaving early cancels it."""
        stream: Stream = self.call(lambda: self.client.generate(prompt, params))
        try:
            while True:
                piece = self.call(lambda: _next(stream))
                if piece is None:
                    return
                yield piece
        finally:
            self.call(stream.aclose)

    def close(self) -> None:
        """Cancel what is open; stop the daemon if it is our own."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _next(stream: Stream) -> Piece | None:
    return await anext(stream, None)


@asynccontextmanager
async def _connect(run: Path) -> AsyncIterator[Client]:
    async with Client.connect(run) as client:
        yield client


@asynccontextmanager
async def _start(arguments: Sequence[str], timeout_s: float) -> AsyncIterator[Client]:
    """A daemon around the client."""
    daemon = Daemon(arguments)
    try:
        await daemon.born()
        async with Client.connect(daemon.run_dir) as client:
            try:
                await client.wait_ready(timeout_s)
            except ServiceUnavailable as error:
                raise daemon.failure(f"the service did not get ready ({error.reason})") from error
            yield client
    finally:
        with anyio.CancelScope(shield=True):
            await daemon.stop()


def join_or_start(
    model: str | None, config: Path | None, sets: Sequence[str] | None, run: Path | None
) -> BlockingClient:
    """Connected to the daemon that a command means: the one in `run`, else one of its own if it says anything of a
    model or of the configuration, else the newest that runs, else one of its own.

    Raises FileNotFoundError when no daemon runs in `run`."""
    own = model is not None or config is not None or bool(sets)
    if run is not None or not own:
        found = find_run(run)
        if found is not None:
            return BlockingClient(found.path)
        if run is not None:
            raise FileNotFoundError(none_runs(run))
    if sys.stderr.isatty():
        print("starting …", end="\r", file=sys.stderr, flush=True)
    # Quoted as in `octavo serve`: a model called "1e3" stays text.
    arguments = [] if model is None else ["--set", f"model.path={json.dumps(model)}"]
    arguments += [] if config is None else ["--config", str(config)]
    arguments += [word for pair in sets or () for word in ("--set", pair)]
    return BlockingClient(None, arguments)
