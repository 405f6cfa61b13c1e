"""Takes the pictures of the docs from a real run: the real model under a mixed load of two tenants.

    python -m tests.metrics.pictures

Writes tests/results/pictures: `top` and the roofline as SVG, the dashboard and the timeline as Chromium shows them.
"""

from __future__ import annotations

import io
import random
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import anyio
import httpx
from rich.console import Console

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


def main() -> None:
    if shutil.which("chromium") is None:
        sys.exit("chromium is not installed (apt-get install chromium)")
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with daemon(*SETS, gateway=True, model="default") as running:
            running.wait_ready()
            anyio.run(take, running, scratch)
            assert export(run=running.run_dir, out=scratch / "run.html", html=True) == 0
            assert roofline(run=running.run_dir, out=TARGET / "roofline.svg") == 0
            slow = [
                sys.executable,
                "-m",
                "octavo",
                "trace",
                "slow",
                "--over",
                "ttft=100ms",
                "--run",
                str(running.run_dir),
            ]
            print(subprocess.run(slow, capture_output=True, text=True, check=True).stdout)
        screenshot(scratch, (scratch / "run.html").as_uri(), "timeline.png", 1180, 640, 3000)
    for path in sorted(TARGET.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
