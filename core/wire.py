"""The data plane's two sockets: a mailbox that one actor reads, and the addresses that others send to.

Every actor binds one PULL socket, its mailbox, at an endpoint that names its role, replica and generation;
whoever sends to it connects a PUSH socket. A new generation is a new endpoint, so nothing that waits for a dead
peer can ever reach its successor. Nothing here ever blocks: a send that finds the queue full says so, and a
receive that finds nothing returns None. Knows nothing of topologies, fences or actors (see `station`).

A message is a list of frames: header, body, and for a forwarded plan a third.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from octavo.core.messages import Header, Role

PATH_LIMIT = 100
"""Longest socket path in bytes; the kernel's own limit is 107, with an error that explains nothing."""

HIGH_WATER = 8192
"""Messages that may wait on each side of a link. Reaching it means a bug or a dead peer."""


# As numbers: pyzmq's flags are enums, whose every `|` and conversion takes longer than the frame that they are for.
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


def endpoint(run_dir: Path, role: Role, replica: int, generation: int) -> str:
    """Where generation `generation` of an actor has its mailbox."""
    return _ipc(run_dir / f"{role.name.lower()}-{replica}.{generation}")


def client_endpoint(run_dir: Path, name: str) -> str:
    """Where the client of that name has its mailbox."""
    return _ipc(run_dir / f"client-{name}")


def shadow_endpoint(run_dir: Path, group: str) -> str:
    """Where the shadow of this group of policies takes copies of calls."""
    return _ipc(run_dir / f"shadow-{group}")


def control_endpoint(run_dir: Path) -> str:
    """Where the supervisor listens to everyone."""
    return _ipc(run_dir / "control")


def _ipc(path: Path) -> str:
    text = str(path)
    size = len(text.encode())
    if size >= PATH_LIMIT:
        raise ValueError(
            f"socket path {text} has {size} bytes, but fewer than {PATH_LIMIT} are possible: choose a shorter run_dir"
        )
    return f"ipc://{text}"


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. To receive and find none raises, which takes several times as long."""
    return bool(int(socket.get(_EVENTS)) & _READABLE)


class Arrivals:
    """Waits for a socket within one event loop; a poller has no use for it. Its reader stays, since setting one up for
    every message costs more than the message."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._descriptor = int(socket.fd)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()

    async def wait(self) -> None:
        """Return once something may have come. Call it only after a receive found nothing: the descriptor is
        edge-triggered, and only an empty receive re-arms it."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._arrived.set)
        await self._arrived.wait()
        self._arrived.clear()

    def close(self) -> None:
        """Before the socket is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)


class Mailbox:
    """A bound PULL socket. Use it from one thread; `socket` is for a poller."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, high_water: int = HIGH_WATER) -> None:
        self.endpoint = endpoint
        self.socket = context.socket(zmq.PULL)
        self.socket.linger = 0
        self.socket.rcvhwm = high_water
        self.socket.bind(endpoint)
        self._arrivals = Arrivals(self.socket)

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None when nothing waits."""
        if not readable(self.socket):
            return None
        frame = self.socket.recv(_NOW, copy=False)
        frames = [frame.bytes]
        while frame.more:  # all have come with the first: a message arrives whole; asking the socket costs a call more
            frame = self.socket.recv(_NOW, copy=False)
            frames.append(frame.bytes)
        return frames

    async def wait(self) -> None:
        """Return once something may have come; only after `receive` gave None."""
        await self._arrivals.wait()

    def close(self) -> None:
        self._arrivals.close()
        self.socket.close()


class Address:
    """A connected PUSH socket to one peer's mailbox. Use it from one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, high_water: int = HIGH_WATER) -> None:
        self.endpoint = endpoint
        self._socket = context.socket(zmq.PUSH)
        self._socket.linger = 0
        self._socket.sndhwm = high_water
        self._socket.connect(endpoint)

    def send(self, frames: Sequence[bytes]) -> bool:
        """False when the queue is full; then nothing was sent."""
        *first, last = frames
        try:
            for frame in first:
                self._socket.send(frame, _NOW_AND_MORE)
            self._socket.send(last, _NOW)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        """What still waits is sent within this time, or never."""
        self._socket.close(linger_ms)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    return _encoder.encode(header)


def decode_header(frame: bytes) -> Header:
    """`msgspec.DecodeError` or `ValidationError` if it is none."""
    return _decoder.decode(frame)
