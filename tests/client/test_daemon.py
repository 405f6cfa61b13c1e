"""The client against real processes: the ghost answers, and whoever is killed, the answer is the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from octavo.core.client.client import Client
from octavo.core.client.llm import parameters
from octavo.core.client.stream import Piece, RequestRefused, ServiceUnavailable, Stream
from octavo.core.messages import Chat, Ids, Params, Prompt, Text
from tests.processes.daemon import STEP_PATH, Daemon, daemon, eventually

pytestmark = pytest.mark.anyio

Answer = dict[int, tuple[list[int], str, str | None]]
"""Per choice its ids, its text and how it finished."""

GREEDY = parameters(temperature=0, max_tokens=400)
SEEDED = parameters(seed=7, max_tokens=300, n=3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def ghost() -> Iterator[Daemon]:
    with daemon("kv.tokens=16384") as running:
        running.wait_ready()
        yield running


def fold(pieces: list[Piece]) -> Answer:
    answer: Answer = {}
    for piece in pieces:
        ids, text, finish = answer.get(piece.choice, ([], "", None))
        assert piece.index == len(ids)
        assert finish is None
        answer[piece.choice] = (ids + piece.ids, text + piece.text, piece.finish)
    return answer


async def ask(client: Client, prompt: Prompt, params: Params, started: anyio.Event | None = None) -> Answer:
    """The whole answer; `started` is set once a good part of it has come."""
    pieces: list[Piece] = []
    with anyio.fail_after(60):
        async with await client.generate(prompt, params) as stream:
            async for piece in stream:
                pieces.append(piece)
                if started is not None and len(pieces) >= 50:
                    started.set()
    return fold(pieces)


async def test_choices_have_texts_of_their_own_and_a_seed_repeats_them(ghost: Daemon) -> None:
    async with Client.connect(ghost.run_dir) as client:
        await client.wait_ready(60)
        params = parameters(seed=3, n=3, max_tokens=20)
        first = await ask(client, Text("hello"), params)
        assert {len(ids) for ids, _, _ in first.values()} == {20}
        assert {finish for _, _, finish in first.values()} == {"length"}
        assert len({text for _, text, _ in first.values()}) == 3
        assert await ask(client, Text("hello"), params) == first
        assert await ask(client, Text("hello"), parameters(n=3, max_tokens=20)) != first


async def test_a_stop_string_ends_the_answer_before_it(ghost: Daemon) -> None:
    async with Client.connect(ghost.run_dir) as client:
        await client.wait_ready(60)
        _, whole, _ = (await ask(client, Text("hello"), parameters(temperature=0, max_tokens=40)))[0]
        stop = whole[20:23]
        params = parameters(temperature=0, max_tokens=40, stop=stop)
        _, text, finish = (await ask(client, Text("hello"), params))[0]
        assert (text, finish) == (whole[: whole.index(stop)], "stop")


async def test_leaving_a_stream_cancels_it(ghost: Daemon) -> None:
    async with Client.connect(ghost.run_dir) as client:
        await client.wait_ready(60)
        async with await client.generate(Chat([{"role": "user", "content": "hi"}]), Params(n=2)) as stream:
            await anext(stream)
        await anyio.to_thread.run_sync(eventually, "nothing runs", lambda: is_idle(ghost))


async def test_a_client_that_goes_leaves_nothing_running(ghost: Daemon) -> None:
    async with Client.connect(ghost.run_dir) as client:
        await client.wait_ready(60)
        stream = await client.generate(Text("hi"), Params())
        await anext(stream)
    with pytest.raises(ServiceUnavailable):
        await rest(stream)
    await anyio.to_thread.run_sync(eventually, "nothing runs", lambda: is_idle(ghost))


async def rest(stream: Stream) -> list[Piece]:
    with anyio.fail_after(60):
        return [piece async for piece in stream]


def is_idle(ghost: Daemon) -> bool:
    stats = ghost.actors()["scheduler"].stats
    return stats.get("running") == stats.get("waiting") == 0


async def test_a_refusal_names_the_field_and_disturbs_nobody(ghost: Daemon) -> None:
    async with Client.connect(ghost.run_dir) as client:
        facts = await client.wait_ready(60)
        async with await client.generate(Ids([97] * (facts.context + 1)), Params()) as stream:
            with pytest.raises(RequestRefused) as refused:
                await stream.accepted()
        assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
        assert await ask(client, Text("x"), parameters(max_tokens=3))


async def test_questions_are_answered_also_over_a_tokenizers_death(ghost: Daemon) -> None:
    async with Client.connect(ghost.run_dir) as client:
        await client.wait_ready(60)
        ids = await client.tokenize(Text("héllo"))
        assert await client.detokenize(ids) == "héllo"
        with pytest.raises(RequestRefused):
            await client.detokenize([10**6])
        pid = ghost.kill("tokenizer")
        assert await client.tokenize(Text("héllo"), timeout_s=60) == ids
        await anyio.to_thread.run_sync(ghost.wait_replaced, "tokenizer", pid)


ASKED: list[tuple[Prompt, Params]] = [
    (Text("one"), GREEDY),
    (Text("two"), SEEDED),
    (Chat([{"role": "user", "content": "three"}]), GREEDY),
    (Ids([4, 4, 4, 4]), SEEDED),
]


@pytest.fixture(scope="module")
def undisturbed(ghost: Daemon) -> list[Answer]:
    """The answers to ASKED when nobody dies."""

    async def all_of_them() -> list[Answer]:
        async with Client.connect(ghost.run_dir) as client:
            await client.wait_ready(60)
            return [await ask(client, *one) for one in ASKED]

    return anyio.run(all_of_them)


@pytest.mark.parametrize("role", STEP_PATH)
async def test_whoever_is_killed_under_four_streams_the_answers_are_the_same(
    ghost: Daemon, undisturbed: list[Answer], role: str
) -> None:
    answers: list[Answer] = [{} for _ in ASKED]
    started = [anyio.Event() for _ in ASKED]
    pid = ghost.pids()[role]

    async def again(client: Client, i: int) -> None:
        answers[i] = await ask(client, *ASKED[i], started[i])

    async with Client.connect(ghost.run_dir) as client:
        await client.wait_ready(60)
        async with anyio.create_task_group() as tasks:
            for i in range(len(ASKED)):
                tasks.start_soon(again, client, i)
            for event in started:
                await event.wait()
            assert not any(answers), "an answer was whole before anyone died"
            os.kill(pid, signal.SIGKILL)
        assert answers == undisturbed
        await anyio.to_thread.run_sync(ghost.wait_replaced, role, pid)


async def test_when_the_daemon_dies_open_requests_say_so() -> None:
    with daemon() as short:
        await anyio.to_thread.run_sync(short.wait_ready)
        async with Client.connect(short.run_dir) as client:
            await client.wait_ready(60)
            assert client.health().ok
            async with await client.generate(Text("x"), Params()) as stream:
                await anext(stream)
                os.kill(short.process.pid, signal.SIGKILL)
                with pytest.raises(ServiceUnavailable, match="died"):
                    await rest(stream)
            assert not client.health().ok
            with pytest.raises(ServiceUnavailable):
                await client.generate(Text("x"), Params())


async def test_an_error_of_the_user_comes_out_as_it_is(ghost: Daemon) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Client.connect(ghost.run_dir):
            raise ZeroDivisionError


async def test_there_must_be_a_daemon(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        async with Client.connect(tmp_path):
            pass
