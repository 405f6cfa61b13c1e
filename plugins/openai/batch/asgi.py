"""One POST to an ASGI application in this process. So a batch is answered by the very code that serves HTTP, with no
socket between."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope


class Reply(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Reply:
    """The whole answer. A fault of the application's own, which it raises again after its answer, is in the answer."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
        "client": None,
        "server": None,
        "state": {},
    }
    sent = False
    status, headers, chunks = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:  # nobody ever hangs up
            await anyio.sleep_forever()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            chunks.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # whatever it is, starlette answers first and raises it again for a server's log
        if not chunks:
            raise
    return Reply(status, headers, b"".join(chunks))
