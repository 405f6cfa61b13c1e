"""Many streams at once over the client library, on a running daemon: no HTTP between.

python examples/many_streams.py [STREAMS]
"""

import sys
import time

import anyio

from octavo.core.client.client import Client
from octavo.core.client.llm import parameters
from octavo.core.messages import Text
from octavo.core.rundir import find_run


async def main(streams: int) -> None:
    run = find_run()
    if run is None:
        sys.exit("no daemon runs: start one with `octavo serve`")
    first: list[float] = []
    tokens = 0

    async def one(client: Client, number: int) -> None:
        nonlocal tokens
        began = time.monotonic()
        async with await client.generate(Text(f"Story {number}:"), parameters(max_tokens=64)) as stream:
            async for piece in stream:
                if piece.index == 0:
                    first.append(time.monotonic() - began)
                tokens += len(piece.ids)

    async with Client.connect(run) as client:
        await client.wait_ready(60)
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for number in range(streams):
                tasks.start_soon(one, client, number)
        took = time.monotonic() - began
    median = sorted(first)[len(first) // 2]
    print(f"{streams} streams: {tokens / took:.0f} tokens/s, first token after {median * 1000:.0f} ms (median)")


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 16)
