"""`model` may name an adapter: what the engine is asked then, and what the routes answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo.core.config.schema import Config, ServerConfig
from octavo.core.messages import Adapter
from tests.gateway.test_errors import error
from tests.gateway.test_generate import USER, post

pytestmark = pytest.mark.anyio

RED = Adapter("red", "/red", b"r" * 16)


@pytest.fixture
def config() -> Config:
    return Config(server=ServerConfig(adapter_routes=True))


async def test_all_prompts_of_a_call_get_the_content_that_the_name_had(http: httpx.AsyncClient, engine: Any) -> None:
    engine.adapters["red"] = RED
    answer = await post(http, "completions", model="red", prompt=["a", "b"])
    assert answer.json()["model"] == "red"
    assert [params.adapter for _, _, params in engine.seen] == [RED, RED]
    await post(http, "chat/completions", model="m", messages=USER)
    assert engine.seen[-1][2].adapter == ""


async def test_beams_of_a_call_do_too(http: httpx.AsyncClient, engine: Any) -> None:
    engine.adapters["red"] = RED
    await post(http, "completions", model="red", prompt="a", use_beam_search=True, n=2, max_tokens=2)
    assert {params.adapter for _, _, params in engine.seen} == {RED}


async def test_routes_are_vllms(http: httpx.AsyncClient) -> None:
    body = {"lora_name": "blue", "lora_path": "/blue", "lora_int_id": 3}
    loaded = await http.post("/v1/load_lora_adapter", json=body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'blue' added successfully.")
    assert loaded.headers["x-octavo-ignored-fields"] == "lora_int_id"
    assert error(await http.post("/v1/load_lora_adapter", json=body), 400)["code"] == "already_loaded"
    assert (await http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})).status_code == 200
    cards = {card["id"]: card["parent"] for card in (await http.get("/v1/models")).json()["data"]}
    assert cards == {"m": None, "blue": "m"}
    gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "blue"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'blue' removed successfully.")
    known = error(await http.post("/v1/unload_lora_adapter", json={"lora_name": "blue"}), 404)
    assert (known["param"], known["code"]) == ("lora_name", "model_not_found")


@pytest.mark.parametrize("body", [{}, {"lora_name": "x"}, {"lora_path": "/x"}, {"lora_name": "", "lora_path": "/x"}])
async def test_both_name_and_path_are_needed(http: httpx.AsyncClient, body: dict[str, str]) -> None:
    assert error(await http.post("/v1/load_lora_adapter", json=body), 400)["param"] in ("lora_name", "lora_path")
