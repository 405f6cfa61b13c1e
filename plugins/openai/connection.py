"""One client's connection, and when it is dropped for reading too slowly.

What the gateway writes goes to the kernel's buffer, then to the connection's own (64 KiB, or one event if that is
larger); when that is full too, the answer waits, and its output in the client library's `Backlog`. Nobody else waits
for it. A connection is dropped, and with it its requests, when

- something lies in its own buffer for `slow_reader_s`, and the client has taken less than `LEAST_BYTES` of it, or
- its backlog is over its limit: it has told `DROP`, an extension of the ASGI scope.

`WRITE`, another one, writes a part of a body without a task that waits, if nothing has to be waited for.

A request's head (first line and headers) may have `HEAD_BYTES` and take `HEAD_S`: before it is complete nobody knows
who asks, so nobody is answered. What a body sent in chunks has beside itself (chunks' own heads, trailers, which nobody
reads) may have as much between two of its parts.

Knows nothing of what is written.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.core.trace.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

DROP = "octavo.drop"
WRITE = "octavo.write"

Write: TypeAlias = "Callable[[Callable[[], bytes]], bool]"
"""Makes a part of a chunked body, if the connection takes one now, and writes it; whether it did. What `make` raises
leaves the connection as it was."""

LEAST_BYTES = 48 * 1024
"""From full (64 KiB) to where writing goes on (16 KiB)."""

HEAD_BYTES = 64 * 1024
HEAD_S = 30.0

_AT_ONCE = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Held:
    """What connections have held: the most bytes in the buffer of one of them so far."""

    most: int = 0


def connection_of(slow_reader_s: float, held: Held) -> type[asyncio.Protocol]:
    """The protocol for uvicorn."""

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _left = 0
        """Bytes in the buffer when the timer was set."""
        _lost = False
        _head: int | None = 0
        """Bytes of a head that is not complete yet; None while there is none."""
        _waiting: asyncio.TimerHandle | None = None
        """For the head."""
        _beside = 0
        """Bytes since the last part of a body."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._waiting = self.loop.call_later(HEAD_S, self._head_is_late)

        def data_received(self, data: bytes) -> None:
            if self._head is not None:
                self._head += len(data)
            else:
                self._beside += len(data)
            super().data_received(data)
            if self._beside > HEAD_BYTES:
                self.transport.abort()
            if self._head is not None and self._head > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request's first line and headers have more than {HEAD_BYTES} bytes.")

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._head is not None:  # else it is a trailer
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._beside = 0
            super().on_body(body)

        def on_headers_complete(self) -> None:
            self._head = None
            self._beside = 0
            self._stop_waiting()
            super().on_headers_complete()

        def _head_is_late(self) -> None:
            if not self._lost:
                self.transport.abort()

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def on_message_begin(self) -> None:
            self._head = self._head or 0
            if self._waiting is None:
                self._waiting = self.loop.call_later(HEAD_S, self._head_is_late)
            super().on_message_begin()
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            scope["extensions"] = {DROP: self._overrun, WRITE: partial(self._write, scope)}

        def pause_writing(self) -> None:
            super().pause_writing()
            held.most = max(held.most, self._buffered())
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._buffered():
                self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._lost = True
            self._rest()
            self._stop_waiting()
            super().connection_lost(exc)

        def _buffered(self) -> int:
            return self.transport.get_write_buffer_size()

        def _watch(self) -> None:
            self._rest()
            self._left = self._buffered()
            self._timer = self.loop.call_later(slow_reader_s, self._check)

        def _rest(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _check(self) -> None:
            left = self._buffered()
            if self.flow.write_paused or self.cycle.response_complete:
                if left and self._left - left < LEAST_BYTES:
                    self._drop(f"it took {self._left - left} bytes in {slow_reader_s:g} s, and {left} wait")
                elif left:
                    self._watch()

        def _write(self, scope: dict[str, Any], make: Callable[[], bytes]) -> bool:
            cycle = self.cycle
            if cycle is None or cycle.scope is not scope:  # its client has sent the next request already
                return False
            open_ = cycle.response_started and not cycle.response_complete and not cycle.disconnected
            if not open_ or not cycle.chunked_encoding or self.flow.write_paused:
                return False
            if data := make():
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return True

        def _overrun(self) -> None:
            # Told from where everybody's output is received, and that goes on whatever becomes of this connection.
            self.loop.call_soon(self._over)

        def _over(self) -> None:
            self._drop(f"its backlog is over the limit, and {self._buffered()} bytes wait")

        def _drop(self, why: str) -> None:
            if self._lost:  # its socket is closed, and the number may be another's by now
                return
            log().warning("a slow reader is dropped", client=self.client, why=why)
            # A reset: what the kernel still holds would otherwise stay there until the client reads it.
            with suppress(OSError):  # the client has reset it first
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self.transport.abort()

    return Connection
