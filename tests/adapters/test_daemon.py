"""Adapters through a whole daemon on the ghost: names, the prefix tree, and whoever dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from octavo.core.client.client import Client
from octavo.core.client.stream import RequestRefused
from octavo.core.messages import Params, Sampling, Text
from tests.processes.daemon import STEP_PATH, Daemon, daemon, eventually

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
LONG = 300


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def adapter(folder: Path, content: str) -> Path:
    """Anything is one for the ghost."""
    folder.mkdir(exist_ok=True)
    (folder / "content").write_text(content)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ghostly")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Daemon]:
    red, blue = adapter(folder / "red", "red"), adapter(folder / "blue", "blue")
    sets = (f"lora.red={red}", f"lora.v1.blue={blue}", "server.adapter_routes=true", "supervisor.max_restarts=50")
    with daemon(*sets, gateway=True) as started:
        started.wait_ready()
        yield started


@pytest.fixture
async def http(running: Daemon) -> Any:
    address = running.info().address
    assert address is not None
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        yield client


async def ask(http: httpx.AsyncClient, model: str, text: str = "x" * 64, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    response = await http.post(CHAT, json={"model": model, "messages": messages, "max_tokens": 8} | more)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def warm(answer: dict[str, Any]) -> bool:
    """Whether its prompt was cached; the first words of a template are soon there for everyone."""
    usage = answer["usage"]
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert tokens < 9 or tokens > usage["prompt_tokens"] - 9
    return tokens > 9


async def load(http: httpx.AsyncClient, name: str, path: Path, **more: Any) -> httpx.Response:
    return await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | more)


async def unload(http: httpx.AsyncClient, name: str) -> httpx.Response:
    return await http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def test_models_lists_adapters_with_their_base(http: httpx.AsyncClient) -> None:
    cards = {card["id"]: card["parent"] for card in (await http.get("/v1/models")).json()["data"]}
    assert cards.items() >= {"ghost": None, "red": "ghost", "v1.blue": "ghost"}.items()
    assert (await http.get("/v1/models/v1.blue")).json()["parent"] == "ghost"
    assert (await http.get("/v1/models/green")).status_code == 404


async def test_the_model_of_a_request_chooses(http: httpx.AsyncClient) -> None:
    answers = [await ask(http, model, temperature=0) for model in ("ghost", "red", "v1.blue", "red")]
    texts = [said(answer) for answer in answers]
    assert texts[1] == texts[3]
    assert len(set(texts)) == 3
    assert [answer["model"] for answer in answers] == ["ghost", "red", "v1.blue", "red"]


async def test_a_name_that_is_none_is_a_404_that_lists_what_is_there(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={"model": "green", "messages": [{"role": "user", "content": "hi"}]})
    assert response.status_code == 404
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == ("model", "model_not_found")
    assert "'ghost', 'red', 'v1.blue'" in response.json()["error"]["message"]


async def test_h35_adapters_share_prefixes_by_content_alone(http: httpx.AsyncClient, folder: Path) -> None:
    prompt = "shared by content " * 4
    assert not warm(await ask(http, "red", prompt))
    assert warm(await ask(http, "red", prompt))
    assert not warm(await ask(http, "ghost", prompt))
    assert not warm(await ask(http, "v1.blue", prompt))
    alias = await load(http, "alias", adapter(folder / "same as red", "red"))
    assert alias.text == "Success: LoRA adapter 'alias' added successfully."
    assert warm(await ask(http, "alias", prompt))
    assert (await unload(http, "alias")).status_code == 200


async def test_h36_a_reloaded_name_finds_nothing_of_its_former_content(http: httpx.AsyncClient, folder: Path) -> None:
    path, prompt = adapter(folder / "changing", "first"), "heat " * 12
    assert (await load(http, "changing", path)).status_code == 200
    first = await ask(http, "changing", prompt, temperature=0)
    assert warm(await ask(http, "changing", prompt))
    adapter(path, "second")
    assert warm(await ask(http, "changing", prompt)), "the name stands for what was loaded"
    assert (await load(http, "changing", path, load_inplace=True)).status_code == 200
    second = await ask(http, "changing", prompt, temperature=0)
    assert not warm(second)
    assert said(second) != said(first)
    adapter(path, "first")
    assert (await unload(http, "changing")).status_code == 200
    assert (await load(http, "changing", path)).status_code == 200
    again = await ask(http, "changing", prompt, temperature=0)
    assert (said(again), warm(again)) == (said(first), True)
    assert (await unload(http, "changing")).status_code == 200


async def test_what_loading_refuses_says_why(http: httpx.AsyncClient, folder: Path) -> None:
    taken = await load(http, "red", folder / "red")
    assert (taken.status_code, taken.json()["error"]["code"]) == (400, "already_loaded")
    nothing = await load(http, "nothing", folder / "nothing")
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (400, "invalid_adapter")
    assert "there is no file" in nothing.json()["error"]["message"]
    itself = await load(http, "ghost", folder / "red")
    assert "is the model itself" in itself.json()["error"]["message"]
    gone = await unload(http, "never")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert (await http.post("/v1/load_lora_adapter", json={"lora_name": "x"})).status_code == 400


async def answer(client: Client, name: str, seed: int, begun: anyio.Event | None = None) -> str:
    params = Params(adapter=name, max_tokens=LONG, sampling=Sampling(temperature=1.0, seed=seed))
    text = ""
    async with await client.generate(Text(f"prompt {seed} " * 5), params) as stream:
        async for piece in stream:
            text += piece.text
            assert piece.finish in (None, "length"), piece.reason
            if begun is not None and len(text) > 20:
                begun.set()
    return text


@pytest.mark.parametrize("role", STEP_PATH)
async def test_whoever_dies_an_adapters_stream_goes_on_with_it(running: Daemon, role: str) -> None:
    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(30)
        expected = await answer(client, "red", 3)
        begun, got = anyio.Event(), list[str]()

        async def one() -> None:
            got.append(await answer(client, "red", 3, begun))

        with anyio.fail_after(90):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                await begun.wait()
                killed = running.kill(role)
        assert got == [expected]
        await anyio.to_thread.run_sync(running.wait_replaced, role, killed)
        assert set(client.adapters) == {"red", "v1.blue"}, "names outlive whoever dies"


async def test_a_request_keeps_what_its_name_stood_for(running: Daemon, folder: Path) -> None:
    """Through an unload, a reload with other content, and the death of the scheduler: its resume means the same."""
    path = adapter(folder / "pinned", "before")
    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(30)
        await client.set_adapter("pinned", str(path))
        expected = await answer(client, "pinned", 5)
        begun, got = anyio.Event(), list[str]()

        async def one() -> None:
            got.append(await answer(client, "pinned", 5, begun))

        with anyio.fail_after(90):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                await begun.wait()
                await client.set_adapter("pinned", str(adapter(path, "after")), replace=True)
                killed = running.kill("scheduler")
        assert got == [expected]
        await anyio.to_thread.run_sync(running.wait_replaced, "scheduler", killed)
        await client.wait_ready(30)
        assert await answer(client, "pinned", 5) != expected
        await client.set_adapter("pinned")
        with pytest.raises(RequestRefused, match=r"there is no adapter 'pinned'; loaded: red, v1\.blue"):
            await answer(client, "pinned", 5)


async def test_loads_under_load_lose_nothing(running: Daemon, folder: Path) -> None:
    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(30)
        expected = {seed: await answer(client, ("red", "")[seed % 2], seed) for seed in range(4)}
        got: dict[int, str] = {}

        async def one(seed: int) -> None:
            got[seed] = await answer(client, ("red", "")[seed % 2], seed)

        with anyio.fail_after(90):
            async with anyio.create_task_group() as tasks:
                for seed in expected:
                    tasks.start_soon(one, seed)
                for turn in range(20):
                    await client.set_adapter("busy", str(adapter(folder / "busy", f"{turn}")))
                    await client.set_adapter("busy")
        assert got == expected


def test_a_bad_adapter_stops_the_start_in_a_line(tmp_path: Path) -> None:
    with daemon(f"lora.bad={tmp_path / 'nothing'}") as short:
        assert short.wait_end() == 1
        assert f"lora.bad: {tmp_path / 'nothing'} is no adapter: there is no file" in short.log


def test_routes_are_off_unless_allowed(tmp_path: Path) -> None:
    with daemon(gateway=True) as plain:
        plain.wait_ready()
        body = {"lora_name": "x", "lora_path": str(tmp_path)}
        response = httpx.post(f"{plain.info().address}/v1/load_lora_adapter", json=body, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "adapter_routes_off")
        assert "server.adapter_routes" in response.json()["error"]["message"]


async def test_an_adapter_that_changed_loses_its_name_when_the_executor_is_replaced(
    running: Daemon, folder: Path
) -> None:
    path = adapter(folder / "fickle", "one")
    async with Client.connect(running.run_dir) as client:
        await client.wait_ready(30)
        await client.set_adapter("fickle", str(path))
        adapter(path, "two")
        killed = running.kill("executor")
        await anyio.to_thread.run_sync(running.wait_replaced, "executor", killed)
        await anyio.to_thread.run_sync(
            eventually, "the name is taken away", lambda: "has other content now" in running.log
        )
        await client.wait_ready(30)
        assert set(client.adapters) == {"red", "v1.blue"}
