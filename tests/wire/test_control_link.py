"""The control line: a member's thread against a supervisor's bare socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
import zmq

from octavo.core import control, rundir, wire
from octavo.core.config.schema import Config
from octavo.core.control import Bye, Go, Heartbeat, Hello, Progress, Shutdown, ToSupervisor, Who
from octavo.core.control_link import ControlLink
from octavo.core.messages import Role

PATIENCE_MS = 10_000

Context = zmq.Context[zmq.Socket[bytes]]


class Supervisor:
    """The far end: a ROUTER, and the identity of the last who spoke."""

    def __init__(self, context: Context, run_dir: Path) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.sndhwm = 0  # a ROUTER drops what is over its mark, and a slow thread is not what is tested
        self.socket.bind(wire.control_endpoint(run_dir))
        self.identity = b""

    def hear(self) -> ToSupervisor:
        assert self.socket.poll(PATIENCE_MS), "nothing was said"
        self.identity, frame = self.socket.recv_multipart()
        return control.decode_to_supervisor(frame)

    def hear_until(self, kind: type[ToSupervisor]) -> ToSupervisor:
        while not isinstance(message := self.hear(), kind):
            pass
        return message

    def say(self, message: control.Control) -> None:
        self.socket.send_multipart((self.identity, control.encode(message)))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder:
        rundir.write(Path(folder), Config(), model="ghost", pid=os.getpid())
        yield Path(folder)


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def supervisor(context: Context, run_dir: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(context, run_dir)
    yield supervisor
    supervisor.socket.close()


def hear(link: ControlLink) -> control.ToMember:
    assert link.socket.poll(PATIENCE_MS), "nothing was heard"
    message = link.receive()
    assert message is not None
    return message


def test_it_says_hello_and_beats_with_the_latest_progress(
    context: Context, run_dir: Path, supervisor: Supervisor
) -> None:
    with ControlLink.client(context, run_dir, "chat", Role.CLIENT) as link:
        hello = supervisor.hear()
        assert isinstance(hello, Hello)
        assert (hello.role, hello.name, hello.pid) == (Role.CLIENT, "chat", os.getpid())
        assert hello.endpoint == wire.client_endpoint(run_dir, "chat")
        progress = Progress(counter=7, busy_since_ns=3, stats={"running": 2})
        link.progress = lambda: progress
        while True:  # bounded by `hear`: beats that left before are old news
            beat = supervisor.hear()
            if isinstance(beat, Heartbeat) and beat.progress.counter == 7:
                assert beat.progress == progress
                break


def test_both_sides_hear_each_other_while_the_member_is_busy(
    context: Context, run_dir: Path, supervisor: Supervisor
) -> None:
    """Nobody reads the member's side; heartbeats go on, and all that was said is there afterwards, in order."""
    with ControlLink.client(context, run_dir, "chat", Role.CLIENT) as link:
        supervisor.hear()
        for epoch in range(2000):
            supervisor.say(Go(epoch))
        supervisor.hear_until(Heartbeat)
        supervisor.hear_until(Heartbeat)
        assert [hear(link) for _ in range(2000)] == [Go(epoch) for epoch in range(2000)]


def test_who_is_answered_with_hello_and_handed_on(context: Context, run_dir: Path, supervisor: Supervisor) -> None:
    with ControlLink.client(context, run_dir, "chat", Role.CLIENT) as link:
        supervisor.hear_until(Hello)
        supervisor.say(Who())
        supervisor.hear_until(Hello)
        assert hear(link) == Who()


def test_the_last_word_is_delivered(context: Context, run_dir: Path, supervisor: Supervisor) -> None:
    ControlLink.client(context, run_dir, "chat", Role.CLIENT).close(Bye())
    assert isinstance(supervisor.hear_until(Bye), Bye)


def test_an_event_loop_can_wait_while_it_also_sends(context: Context, run_dir: Path, supervisor: Supervisor) -> None:
    async def talk(link: ControlLink) -> list[control.ToMember]:
        heard = []
        with anyio.fail_after(PATIENCE_MS / 1000):
            async for message in link.messages():
                heard.append(message)
                link.send(control.TopologyAck(len(heard)))
                if len(heard) == 20:
                    break
                supervisor.say(Go(len(heard)))
        return heard

    with ControlLink.client(context, run_dir, "chat", Role.CLIENT) as link:
        supervisor.hear_until(Hello)
        supervisor.say(Go(0))
        assert anyio.run(talk, link) == [Go(epoch) for epoch in range(20)]


def test_the_supervisors_death_is_heard_as_a_shutdown(context: Context, run_dir: Path) -> None:
    """Even when its parent has not collected it yet."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    rundir.write(run_dir, Config(), model="ghost", pid=process.pid)
    with ControlLink.client(context, run_dir, "chat", Role.CLIENT) as link:
        assert link.receive() is None
        process.kill()
        message = hear(link)
        assert isinstance(message, Shutdown)
        assert str(process.pid) in message.why
    process.communicate()


def test_a_daemon_that_is_dead_already_is_heard_as_a_shutdown(context: Context, run_dir: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    rundir.write(run_dir, Config(), model="ghost", pid=process.pid)
    with ControlLink.client(context, run_dir, "chat", Role.CLIENT) as link:
        assert isinstance(hear(link), Shutdown)


def test_without_a_run_there_is_a_clear_error(context: Context, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no daemon was started there"):
        ControlLink.client(context, tmp_path, "chat", Role.CLIENT)
