"""Server-sent events: the framing of a stream, nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies see that the connection lives."""

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(data: Any) -> bytes:
    """One object as one event, named by its type if it has one; JSON has no line breaks of its own."""
    name = b"event: " + data["type"].encode() + b"\n" if "type" in data else b""
    return name + b"data: " + _encoder.encode(data) + b"\n\n"
