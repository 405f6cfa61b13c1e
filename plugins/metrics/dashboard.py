"""The page at `/dashboard`: the figures of `octavo top`, for a browser. It loads nothing from anywhere but its data."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from octavo.core.rundir import read
from octavo.core.supervisor.status import ask
from octavo.plugins.metrics.live import Figures, Live

PAGE = Path(__file__).with_name("dashboard.html")
FRESH_S = 0.5
"""Two browsers that look at once are shown the same."""


class Dashboard:
    """Both routes. Looks at the service only while somebody looks at the page."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._live: Live | None = None
        self._turn = anyio.Lock()
        self._last: tuple[float, Figures] | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/dashboard", self.page, methods=["GET"]),
            Route("/dashboard/data", self.data, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"cache-control": "no-cache"})

    async def data(self, request: Request) -> Response:
        async with self._turn:
            now = anyio.current_time()
            if self._last is None or now - self._last[0] > FRESH_S:
                figures = await anyio.to_thread.run_sync(self._look)
                self._last = None if figures is None else (now, figures)
        if self._last is None:
            return Response(b'{"error":"the supervisor does not answer"}', 503, media_type="application/json")
        return Response(msgspec.json.encode(self._last[1]), media_type="application/json")

    def _look(self) -> Figures | None:
        info = read(self._run_dir)
        if info is None or (status := ask(info)) is None:
            return None
        if self._live is None:
            self._live = Live(info)
        return self._live.look(status)
