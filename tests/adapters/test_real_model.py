"""The default model with adapters, in real processes: with guesses and without, alone and together, through a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.messages import Params, Sampling, Text
from octavo.core.models.locate import locate
from octavo.executors.loading.files import open_checkpoint
from tests.adapters.made import save_for
from tests.processes.daemon import Daemon, daemon

pytestmark = pytest.mark.anyio

TOKENS = 32
ASKED = {"red": 0.0, "blue": 0.8, "": 0.0}
"""Temperature by adapter."""
Answers = dict[str, str]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, spec = tmp_path_factory.mktemp("real"), open_checkpoint(locate("default")).spec
    save_for(folder / "red", spec, 1)
    save_for(folder / "blue", spec, 2)
    return folder


def served(adapters: Path, *sets: str) -> Iterator[Daemon]:
    names = (f"lora.{name}={adapters / name}" for name in ("red", "blue"))
    with daemon("kv.block_size=16", "scheduler.chunk_budget=32", *names, *sets, model="default") as running:
        running.wait_ready()
        yield running


async def answer(client: Client, name: str, begun: anyio.Event | None = None) -> str:
    sampling = Sampling(temperature=ASKED[name], seed=7)
    params = Params(adapter=name, max_tokens=TOKENS, ignore_eos=True, sampling=sampling)
    text, pieces = "", 0
    async with await client.generate(Text("One, two, three, one, two, three, one, two,"), params) as stream:
        async for piece in stream:
            text, pieces = text + piece.text, pieces + 1
            if begun is not None and pieces > 3:
                begun.set()
    return text


async def together(client: Client, begun: anyio.Event | None = None) -> Answers:
    got: Answers = {}

    async def one(name: str) -> None:
        got[name] = await answer(client, name, begun)

    async with anyio.create_task_group() as tasks:
        for name in ASKED:
            tasks.start_soon(one, name)
    return got


async def test_an_answer_is_the_same_alone_together_and_through_a_kill(adapters: Path) -> None:
    texts: list[Answers] = []
    for guesses in ((), ("speculation.drafter=ngram",)):
        for running in served(adapters, *guesses):
            async with Client.connect(running.run_dir) as client:
                await client.wait_ready(60)
                texts.append({name: await answer(client, name) for name in ASKED})
                texts.append(await together(client))
                if guesses:
                    begun = anyio.Event()
                    async with anyio.create_task_group() as tasks:

                        async def stream(client: Client = client, begun: anyio.Event = begun) -> None:
                            texts.append(await together(client, begun))

                        tasks.start_soon(stream)
                        await begun.wait()
                        running.kill("executor")
    assert len(texts) == 5
    assert all(each == texts[0] for each in texts)
    assert len(set(texts[0].values())) == 3
