"""What normal clients notice of bad ones: 130 streams that read, alone and beside 20 that read a byte a second and 50
that leave. The daemon is real, on the ghost; the same streams each time, in turn. Writes tests/results/slow_readers.md.

    PYTHONPATH=. .venv/bin/python tests/bench/slow_readers.py [--rounds N] [--normal N] [--slow N] [--leaving N]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx

from tests.processes.daemon import Daemon, daemon

RESULT = Path(__file__).parents[1] / "results" / "slow_readers.md"
TOKENS = 100
BODY = {"prompt": "go", "stream": True, "temperature": 0, "max_tokens": TOKENS}
SMALL = 4096


async def normal(client: httpx.AsyncClient, gaps: list[float]) -> None:
    """Read a whole stream; the time between two events that came, in seconds."""
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        last = 0.0
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now


def asked(address: str, tokens: int) -> socket.socket:
    parts = urlsplit(address)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    connection.connect((parts.hostname, parts.port))
    body = json.dumps({**BODY, "max_tokens": tokens, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    connection.setblocking(False)
    return connection


async def slow(address: str) -> None:
    """A byte a second, until somebody ends it."""
    with asked(address, 3000) as connection:
        while True:
            await anyio.sleep(1)
            try:
                connection.recv(1)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return


async def leaving(address: str, after_s: float) -> None:
    with asked(address, 3000):
        await anyio.sleep(after_s)


async def measured(running: Daemon, n: int, slow_n: int, leaving_n: int) -> list[float]:
    address = running.info().address
    assert address is not None
    gaps: list[float] = []
    limits = httpx.Limits(max_connections=n)
    connection = httpx.AsyncClient(base_url=address, timeout=300, limits=limits)
    async with connection as client, anyio.create_task_group() as bad:
        for _ in range(slow_n):
            bad.start_soon(slow, address)
        for i in range(leaving_n):
            bad.start_soon(leaving, address, 0.2 + 0.05 * i)
        async with anyio.create_task_group() as good:
            for _ in range(n):
                good.start_soon(normal, client, gaps)
        bad.cancel_scope.cancel()
    return gaps


def p99_ms(gaps: list[float]) -> float:
    return statistics.quantiles(gaps, n=100)[98] * 1000


async def rounds(count: int, n: int, slow_n: int, leaving_n: int) -> list[tuple[float, float]]:
    found = []
    with daemon("scheduler.max_sequences=256", "kv.tokens=400000", "server.slow_reader_s=5", gateway=True) as running:
        await anyio.to_thread.run_sync(running.wait_ready)
        await measured(running, n, 0, 0)
        for _ in range(count):
            alone = p99_ms(await measured(running, n, 0, 0))
            beside = p99_ms(await measured(running, n, slow_n, leaving_n))
            found.append((alone, beside))
            print(f"alone {alone:.1f} ms, beside bad ones {beside:.1f} ms", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("normal", 130), ("slow", 20), ("leaving", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    found = anyio.run(rounds, given.rounds, given.normal, given.slow, given.leaving)
    ratio = statistics.median(beside / alone for alone, beside in found)
    lines = [f"| {alone:.1f} | {beside:.1f} | {beside / alone:.2f} |" for alone, beside in found]
    about = (
        f"Written by `tests/bench/slow_readers.py`: p99 of the time between two events of {given.normal} streams on\n"
        f"the ghost executor, alone and beside {given.slow} clients that read a byte a second and {given.leaving}\n"
        f"that leave. Those have tokens computed for them too. In turn, a row a round. Median ratio {ratio:.2f}."
    )
    head = "| alone, ms | beside them, ms | ratio |\n|---|---|---|"
    RESULT.write_text("\n".join(["# Normal clients beside bad ones", "", about, "", head, *lines, ""]))


if __name__ == "__main__":
    main()
