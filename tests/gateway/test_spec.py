"""The document tells of what is there, and of nothing else."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.routing import Route

from octavo.core.config.schema import Config
from octavo.plugins.openai.app import build_app
from octavo.plugins.openai.spec import OPERATIONS

pytestmark = pytest.mark.anyio


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()


async def test_it_describes_every_route(http: httpx.AsyncClient, engine: Any) -> None:
    document = (await http.get("/openapi.json")).json()
    served = {
        (method.lower(), route.path.replace(":path", ""))
        for route in build_app(engine, Config()).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    told = {(method, path) for path, item in document["paths"].items() for method in item}
    assert told == OPERATIONS.keys()
    assert told == served - {("get", path) for path in ("/", "/metrics", "/dashboard", "/dashboard/data")}, (
        "pages, and what another plugin adds, tell of themselves"
    )
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known


async def test_its_bodies_are_the_types_that_are_decoded(http: httpx.AsyncClient) -> None:
    schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    assert schemas["ChatBody"]["required"] == ["messages"]
    assert {"tools", "response_format", "deadline_ms"} <= schemas["ChatBody"]["properties"].keys()
    assert {"echo", "best_of"} <= schemas["CompletionBody"]["properties"].keys()
