"""A member's line to the supervisor: a daemon thread that says hello, sends heartbeats and hands over what it hears.

The heartbeat comes from its own thread, so it shows that the process lives; the progress it carries, set by the
actor's thread, shows whether that one does too. What the supervisor says is handed over through an inproc socket,
so that both poll loops and event loops can wait for it together with their mailbox. Decides nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from octavo.core import control, wire
from octavo.core.control import Control, Heartbeat, Hello, Progress, Shutdown, ToMember, ToSupervisor, Who
from octavo.core.messages import Role
from octavo.core.rundir import RunInfo, read

HEARTBEAT_S = 0.5


class ControlLink:
    """Starts at once. `hello` is repeated whenever the supervisor asks. Except `progress`, use it from one thread.

    When the supervisor dies, a `Shutdown` is received like any other message.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, hello: Hello) -> None:
        info = read(run_dir)
        if info is None:
            raise FileNotFoundError(f"no daemon.json in {run_dir}: no daemon was started there")
        self.progress: Callable[[], Progress] = Progress
        """What the next heartbeat carries; called by the thread that sends it."""
        self._hello = hello
        self._daemon = info
        # Two one-way pairs: a send on a socket may swallow the wake-up of one who waits to read from it.
        self.socket, self._heard = _pair(context)
        self._arrivals = wire.Arrivals(self.socket)
        self._told, self._say = _pair(context)
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.linger = 200
        self._dealer.connect(wire.control_endpoint(run_dir))
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    @classmethod
    def client(cls, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, name: str, role: Role) -> ControlLink:
        """The line of a client (or of the gateway, which is one) whose mailbox is `client_endpoint(run_dir, name)`."""
        mailbox = wire.client_endpoint(run_dir, name)
        return cls(context, run_dir, Hello(role=role, name=name, pid=os.getpid(), endpoint=mailbox))

    # ── the member's side ────────────────────────────────────────────────────────────────────────

    def send(self, message: ToSupervisor) -> None:
        self._say.send(control.encode(message))

    def receive(self) -> ToMember | None:
        """What the supervisor said next, or None when nothing waits."""
        return control.decode_to_member(self.socket.recv(zmq.NOBLOCK)) if wire.readable(self.socket) else None

    async def wait(self) -> None:
        """Return once something may have come; only after `receive` gave None."""
        await self._arrivals.wait()

    async def messages(self) -> AsyncIterator[ToMember]:
        """Everything the supervisor says, as it comes."""
        while True:
            message = self.receive()
            if message is None:
                await self.wait()
            else:
                yield message

    def close(self, last: Control | None = None) -> None:
        """Say `last` (Bye, from a client) and stop the thread."""
        if last is not None:
            self._say.send(control.encode(last))
        self._say.send(b"")
        self._thread.join(timeout=5)
        self._arrivals.close()
        self.socket.close()
        self._say.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── the thread's side ────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._told, zmq.POLLIN)
        daemon = _pidfd(self._daemon)
        if daemon is not None:
            poller.register(daemon, zmq.POLLIN)
        try:
            self._tell(self._hello)
            self._loop(poller, daemon)
        finally:
            if daemon is not None:
                os.close(daemon)
            self._dealer.close()
            self._heard.close()
            self._told.close()

    def _loop(self, poller: zmq.Poller, daemon: int | None) -> None:
        if daemon is None:
            self._hand_over(control.encode(Shutdown(f"the daemon (pid {self._daemon.pid}) does not run")))
        next_beat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._tell(Heartbeat(self.progress()))
                next_beat = now + HEARTBEAT_S
            ready = dict(poller.poll(max(0, int((next_beat - now) * 1000))))
            if self._dealer in ready:
                self._hear(self._dealer.recv())
            if daemon in ready:
                poller.unregister(daemon)
                self._hand_over(control.encode(Shutdown(f"the daemon (pid {self._daemon.pid}) has died")))
            if self._told in ready:
                frame = self._told.recv()
                if not frame:
                    return
                self._dealer.send(frame, zmq.NOBLOCK)

    def _hear(self, frame: bytes) -> None:
        try:
            message = control.decode_to_member(frame)
        except msgspec.MsgspecError:
            return  # said by a supervisor of another version: it means nothing to us
        if isinstance(message, Who):
            self._tell(self._hello)
        self._hand_over(frame)

    def _hand_over(self, frame: bytes) -> None:
        self._heard.send(frame)

    def _tell(self, message: Control) -> None:
        with suppress(zmq.Again):  # the supervisor is dead or drowned; the next heartbeat says the same
            self._dealer.send(control.encode(message), zmq.NOBLOCK)


def _pidfd(daemon: RunInfo) -> int | None:
    """Readable once the daemon has ended; None if it has already."""
    try:
        handle = os.pidfd_open(daemon.pid)
    except ProcessLookupError:
        return None
    if daemon.alive():
        return handle
    os.close(handle)
    return None


def _pair(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """(reading end, writing end) of an unbounded queue between two threads; control messages are few."""
    reading, writing = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    name = f"inproc://{id(reading):x}-{time.monotonic_ns()}"
    for socket in (reading, writing):
        socket.linger = 0
        socket.set_hwm(0)
    reading.bind(name)
    writing.connect(name)
    return reading, writing
