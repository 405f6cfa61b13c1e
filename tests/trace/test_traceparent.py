"""A client's trace goes on in ours: W3C `traceparent` becomes the trace id of the request's events."""

from __future__ import annotations

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from octavo.plugins.openai.app import RequestId, trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("valid", [f"00-{TRACE}-{SPAN}-01", f" 00-{TRACE}-{SPAN}-00", f"cc-{TRACE}-{SPAN}-01-more"])
def test_a_valid_header_gives_its_trace_id(valid: str) -> None:
    assert trace_of(valid) == TRACE


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        TRACE,
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_an_invalid_header_is_as_none(wrong: str) -> None:
    assert trace_of(wrong) is None


async def ids(scope: Scope, receive: Receive, send: Send) -> None:
    state = Request(scope).state
    await JSONResponse([state.request_id, state.trace_id])(scope, receive, send)


@pytest.mark.parametrize(
    ("headers", "trace_id", "shown_id"),
    [
        ({"traceparent": f"00-{TRACE}-{SPAN}-01"}, TRACE, None),
        ({"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}, TRACE, "mine"),
        ({"traceparent": "nonsense", "x-request-id": "mine"}, "mine", "mine"),
        ({}, None, None),
    ],
)
def test_which_id_goes_where(headers: dict[str, str], trace_id: str | None, shown_id: str | None) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(RequestId(ids))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/", headers=headers)

    answer = anyio.run(ask)
    own, traced = answer.json()
    assert traced == (trace_id or own)
    assert answer.headers["x-request-id"] == (shown_id or own)
