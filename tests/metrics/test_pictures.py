"""Takes the pictures of the docs from a real run: the real model under a mixed load of two tenants.

    pytest tests/metrics/test_pictures.py --pictures

Writes tests/results/pictures: `top` and the roofline as SVG, the dashboard and the timeline as Chromium shows them, and
the timeline beside that of the simulator, which gets the same requests.
"""

from __future__ import annotations

import io
import random
import re
import time
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest
from rich.console import Console

from octavo.core.cli import main
from octavo.core.client.client import Client
from octavo.core.messages import Params, Text
from octavo.plugins.metrics.live import Live
from octavo.plugins.metrics.top import draw
from octavo.plugins.roofline.command import command as roofline
from octavo.plugins.timeline.command import export
from tests.metrics.browser import chromium
from tests.processes.daemon import Daemon, daemon

TARGET = Path(__file__).parents[1] / "results/pictures"
SETS = ("executor.kind=native", "executor.threads=2", "kv.tokens=6144", "kv.block_size=16",
        "scheduler.max_sequences=12", "scheduler.chunk_budget=256", "supervisor.heartbeat_timeout_s=60")  # fmt: skip
REQUESTS = 48
SHOT_AT = 16
"""After so many requests the live pictures are taken."""
SENTENCES = ("Once upon a time there was a fox", "Tell me about the sea", "The quick brown dog", "List three fruits")


async def load(running: Daemon, half_way: anyio.Event) -> None:
    rng = random.Random(3)
    limit = anyio.CapacityLimiter(20)
    done = 0

    async def ask(client: Client, i: int) -> None:
        nonlocal done
        prompt = f"{SENTENCES[i % 4]}, as they said in town. " * (40 if i % 8 == 5 else rng.choice((1, 2, 5)))
        async with limit:
            tenant = "acme" if i % 3 else "umbrella"
            params = Params(max_tokens=rng.choice((16, 48, 96)), ignore_eos=True)
            async with await client.generate(Text(prompt), params, tenant=tenant) as stream:
                async for _ in stream:
                    pass
        done += 1
        if done == SHOT_AT:
            half_way.set()

    async with Client.connect(running.run_dir) as client, anyio.create_task_group() as tasks:
        await client.wait_ready(60)
        for i in range(REQUESTS):
            tasks.start_soon(ask, client, i)
            await anyio.sleep(0.05)


async def take(running: Daemon, scratch: Path) -> None:
    half_way = anyio.Event()
    live = Live(running.info())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load, running, half_way)
        async with httpx.AsyncClient(base_url=str(running.info().address), timeout=60) as http:
            while not half_way.is_set():  # what the page shows of the past is what somebody looked at
                await http.get("/dashboard/data")
                await anyio.sleep(0.6)
        status = await anyio.to_thread.run_sync(running.status)
        assert status is not None
        live.look(status)
        shot = partial(screenshot, scratch, f"{running.info().address}/dashboard", "dashboard.png", 1180, 900, 9000)
        await anyio.to_thread.run_sync(shot)
        status = await anyio.to_thread.run_sync(running.status)
        assert status is not None
        console = Console(record=True, width=118, file=io.StringIO(), force_terminal=True)
        console.print(draw(live.look(status)))
        text = console.export_svg(title="octavo top", unique_id="top")
        (TARGET / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL))


def screenshot(scratch: Path, url: str, name: str, width: int, height: int, wait_ms: int) -> None:
    size = (f"--window-size={width},{height}", f"--virtual-time-budget={wait_ms}")
    chromium(scratch / "profile", url, *size, f"--screenshot={TARGET / name}")


def test_the_pictures_of_the_docs(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if not pytestconfig.getoption("--pictures"):
        pytest.skip("writes to tests/results: only with --pictures")
    chromium(tmp_path / "profile", "about:blank", "--dump-dom")  # skips where there is none
    TARGET.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with daemon(*SETS, gateway=True, model="default") as running:
        running.wait_ready()
        anyio.run(take, running, tmp_path)
        run = running.run_dir
        assert export(run=run, out=tmp_path / "run.html", html=True) == 0
        assert roofline(run=run, out=TARGET / "roofline.svg") == 0
        simulated = tmp_path / "simulated"
        assert main(["sim", "--trace", str(run), "--out", str(simulated), "--json"]) == 0
        assert export(run=run, beside_=[simulated], out=tmp_path / "both.html") == 0
    screenshot(tmp_path, (tmp_path / "run.html").as_uri(), "timeline.png", 1180, 640, 3000)
    screenshot(tmp_path, (tmp_path / "both.html").as_uri(), "beside.png", 1800, 900, 3000)
    for name in ("timeline.png", "beside.png", "dashboard.png", "top.svg", "roofline.svg"):
        assert (TARGET / name).stat().st_mtime >= began - 1, name
        assert (TARGET / name).stat().st_size > 5000, name
