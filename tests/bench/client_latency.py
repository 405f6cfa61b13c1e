"""How far apart are latencies as the client measures them and as the server reports them?

    python -m tests.bench.client_latency [--requests 200]

One request after the other on a ghost daemon: half through the client library, half over HTTP as server-sent events.
The server's figures are those of the tokenizer, in the event `request.taken`: the client's less the difference that it
states. For HTTP the client is outside: its clock starts before the request is written to its socket. It is a bare
socket, on a connection that is open: what an HTTP library adds is not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from urllib.parse import urlsplit

import anyio

from octavo.core.client.client import Client
from octavo.core.messages import Ids, Params
from octavo.core.pace import Latencies, Pace, latencies, off
from octavo.core.trace.catalogue import RequestTaken
from octavo.core.trace.read import records
from tests.processes.daemon import Daemon, daemon, eventually

RESULT = Path(__file__).parents[1] / "results/client_latency.md"
TOKENS = 24
MEASURES = ("ttft", "itl", "tpot", "e2e")


async def library(running: Daemon, count: int) -> dict[str, Latencies]:
    found = {}
    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(60)
        for i in range(count):
            began = time.monotonic_ns()
            pace, tokens = Pace(began), 0
            async with await client.generate(Ids([i % 256, 1, 2]), Params(max_tokens=TOKENS)) as stream:
                async for piece in stream:
                    if piece.ids:
                        pace.row(time.monotonic_ns())
                        tokens += len(piece.ids)
                found[stream.request_id] = latencies(pace.end(time.monotonic_ns()), tokens)
    return found


async def over_http(running: Daemon, count: int) -> dict[str, Latencies]:
    found = {}
    where = urlsplit(str(running.info().address))
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    for i in range(count):
        asked = {"prompt": f"request {i}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        began = time.monotonic_ns()
        pace, name = Pace(began), ""
        writer.write(head.encode() + body)
        while b"[DONE]" not in (line := await reader.readline()):
            assert line, "the connection has ended"
            if line.startswith(b"data: {"):
                pace.row(time.monotonic_ns())
                name = name or json.loads(line[6:])["id"].removeprefix("cmpl-")
        found[name] = latencies(pace.end(time.monotonic_ns()), TOKENS)
        while await reader.readline() != b"0\r\n":  # the last chunk
            pass
        await reader.readline()
    writer.close()
    return found


def differences(clients: dict[str, Latencies], server: dict[str, RequestTaken]) -> dict[str, list[float]]:
    """Client less server, in ms."""
    found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for name, measured in clients.items():
        event = server[name]
        for measure in MEASURES:
            inside, stated = getattr(event, f"{measure}_ns"), getattr(event, f"{measure}_off_ns")
            difference = off(getattr(measured, measure), off(inside, stated))
            if difference is not None:
                found[measure].append(difference / 1e6)
    return found


def told(way: str, found: dict[str, list[float]]) -> list[str]:
    rows = []
    for measure, values in found.items():
        ranked = sorted(values)
        p99 = ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]
        rows.append(f"| {way} | {measure.upper()} | {statistics.median(ranked):.3f} | {p99:.3f} | {len(ranked)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=200)
    requests = parser.parse_args().requests
    with daemon("scheduler.depth=2", gateway=True) as running:
        running.wait_ready()
        seen = {
            "library": anyio.run(library, running, requests // 2),
            "HTTP": anyio.run(over_http, running, requests // 2),
        }
        eventually("all were taken", lambda: len(running.events("request.taken")) >= 2 * (requests // 2))
        lines = records(running.run_dir)
    server = {line.event.request_id: line.event for line in lines if isinstance(line.event, RequestTaken)}
    rows = [row for way, clients in seen.items() for row in told(way, differences(clients, server))]
    table = ["| client | measure | median ms | p99 ms | requests |", "|---|---|--:|--:|--:|", *rows]
    print("\n".join(table))
    RESULT.write_text(
        "# Latencies of the client less those of the server\n\n"
        f"Written by `python -m tests.bench.client_latency --requests {requests}`: one request at a time, ghost, "
        f"{TOKENS} tokens. The load of the machine was {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.\n\n"
        + "\n".join(table)
        + "\n"
    )


if __name__ == "__main__":
    main()
