"""`octavo batch`: runs what is not answered yet, some requests at a time, and shows how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from starlette.types import ASGIApp

from octavo.core.cli import FAILED, MISUSED, ConfigFile, Run, Sets
from octavo.core.client.blocking import join_or_start
from octavo.core.client.stream import ClientError
from octavo.core.rundir import read_config
from octavo.plugins.openai.app import build_app
from octavo.plugins.openai.batch.asgi import Reply, post
from octavo.plugins.openai.batch.requests import AnswerFile, BatchError, Line, Response, read_requests

BUSY = frozenset({429, 502, 503, 504})
"""Statuses that say nothing about the request itself: it is asked again, here a few times and then by the next run."""

TRIES = 5
PAUSE_S = 0.5
"""After the first refusal; twice as long after each further one."""


def command(
    requests: Path,
    /,
    *,
    output: Path | None = None,
    model: str | None = None,
    config: ConfigFile = None,
    set_: Sets = None,
    run: Run = None,
    concurrency: int = 32,
) -> int:
    """Answer a file of requests in OpenAI's batch format (JSONL), by a running daemon or one that is started for it.

    Stopped or killed half-way, the same command goes on where it was. Exit code 1: some requests have no answer yet.

    Parameters
    ----------
    requests
        a line per request: custom_id, method, url and body
    output
        where the answers go; by default beside the requests, as NAME.answers.jsonl
    model
        start a daemon with this model; like --config and --set, this means that no running one is joined
    concurrency
        how many requests are under way at a time
    """
    if concurrency < 1:
        print(f"octavo: --concurrency must be at least 1, not {concurrency}", file=sys.stderr)
        return MISUSED
    target = output if output is not None else requests.with_name(f"{requests.stem}.answers.jsonl")
    try:
        lines = read_requests(requests)
        answers = AnswerFile(target)
    except (BatchError, OSError) as error:
        print(f"octavo: {error}", file=sys.stderr)
        return MISUSED
    with closing(answers):
        open_ = [line for line in lines if line.custom_id not in answers.done]
        before = len(lines) - len(open_)
        if open_:
            try:
                with join_or_start(model, config, set_, run) as client, _progress(len(lines), before) as advance:
                    app = build_app(client.client, read_config(client.client.run_dir))
                    client.call(lambda: answer_all(app, open_, answers, concurrency, advance))
            except (ClientError, FileNotFoundError) as error:
                print(f"octavo: {error}", file=sys.stderr)
                return FAILED
        missing = [line for line in open_ if line.custom_id not in answers.done]
    print(f"{len(lines) - len(missing)} of {len(lines)} requests are answered in {target}", file=sys.stderr)
    if missing:
        print(f"octavo: the service was too busy for {len(missing)}; run the same command again", file=sys.stderr)
    return FAILED if missing else 0


async def answer_all(
    app: ASGIApp, lines: Sequence[Line], answers: AnswerFile, concurrency: int, advance: Callable[[], Any]
) -> None:
    """Ask for each line, `concurrency` at a time; what is answered for good is written."""
    todo = iter(lines)

    async def take() -> None:
        for line in todo:
            reply = await _ask(app, line)
            if reply.status not in BUSY:
                answers.write(line.custom_id, _response(reply))
            advance()

    async with anyio.create_task_group() as tasks:
        for _ in range(min(concurrency, len(lines))):
            tasks.start_soon(take)


async def _ask(app: ASGIApp, line: Line) -> Reply:
    body = msgspec.json.encode(line.body)
    for attempt in range(TRIES - 1):
        reply = await post(app, line.url, body)
        if reply.status not in BUSY:
            return reply
        await anyio.sleep(PAUSE_S * 2**attempt)
    return await post(app, line.url, body)


def _response(reply: Reply) -> Response:
    request_id = reply.headers.get(b"x-request-id", b"").decode("latin-1")
    return Response(reply.status, request_id, msgspec.json.decode(reply.body))


@contextmanager
def _progress(total: int, before: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("answered", total=total, completed=before)
        yield lambda: bar.advance(task)
