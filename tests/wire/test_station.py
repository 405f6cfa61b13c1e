"""Stations: real sockets between two members of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
import zmq

from octavo.core import wire
from octavo.core.control import READY, ClientGone, Go, Member, QueueFull, Topology
from octavo.core.links import FENCED
from octavo.core.messages import (
    Attach,
    Cancel,
    Hasten,
    KvState,
    Matched,
    Params,
    PeerDown,
    PeerUp,
    Role,
    Submit,
    Text,
    encode,
)
from octavo.core.station import Arrival, Station
from octavo.core.trace.catalogue import WireDropped

PATIENCE_S = 10.0

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


class Net:
    """Stations of a few actors in one run folder, and what each of them reported."""

    def __init__(self, context: Context, run_dir: Path) -> None:
        self.context, self.run_dir = context, run_dir
        self.epoch = 0
        self.generations = dict.fromkeys(sorted(FENCED), 1)
        self.stations: dict[Role, Station] = {}
        self.dropped: list[WireDropped] = []

    def open(self, role: Role, name: str = "") -> Station:
        generation = self.generations.get(role, 0)
        station = Station(self.context, self.run_dir, role, self.dropped.append, name=name, generation=generation)
        self.stations[role] = station
        return station

    def topology(self) -> Topology:
        self.epoch += 1
        members = [
            Member(role=role, replica=0, generation=g, endpoint=wire.endpoint(self.run_dir, role, 0, g), up=True)
            for role, g in self.generations.items()
        ]
        return Topology(epoch=self.epoch, state=READY, members=members, facts=None)

    def settle(self) -> None:
        """Everyone hears the topology, then Go."""
        topology = self.topology()
        for message in (topology, Go(topology.epoch)):
            for station in self.stations.values():
                station.control(message)

    def close(self) -> None:
        for station in self.stations.values():
            station.close()


@pytest.fixture
def net(context: Context, run_dir: Path) -> Iterator[Net]:
    net = Net(context, run_dir)
    yield net
    net.close()


def receive(station: Station, timeout_s: float = PATIENCE_S) -> Arrival | None:
    """The next believed message, or None if none comes in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (arrival := station.receive()) is not None:
            return arrival
        station.mailbox.socket.poll(10)
    return None


STATE = encode(KvState(8, 8, 0))


def test_a_message_arrives_with_its_extra_frames_untouched(net: Net) -> None:
    kv, scheduler = net.open(Role.KV), net.open(Role.SCHEDULER)
    net.settle()
    assert kv.send(Role.SCHEDULER, STATE, b"beside")
    arrival = receive(scheduler)
    assert arrival is not None
    assert isinstance(arrival.body, KvState)
    assert arrival.frames == [STATE, b"beside"]
    assert arrival.header.source is Role.KV


def test_nothing_is_sent_before_go_and_that_is_reported(net: Net) -> None:
    kv = net.open(Role.KV)
    kv.control(net.topology())
    assert not kv.send(Role.SCHEDULER, STATE)
    assert [drop.peer for drop in net.dropped] == ["scheduler"]


def test_a_queue_that_is_full_is_reported_and_blocks_nobody(net: Net) -> None:
    """The peer's mailbox is bound by nobody: everything stays in the sender's queue."""
    kv = net.open(Role.KV)
    net.settle()
    sent = 0
    while kv.send(Role.SCHEDULER, STATE):
        sent += 1
        assert sent <= wire.HIGH_WATER
    assert sent == wire.HIGH_WATER
    assert "full" in net.dropped[0].why
    assert not kv.send(Role.SCHEDULER, STATE)
    assert kv.full == [QueueFull(role=Role.SCHEDULER, generation=1)], "whatever is lost, it is one fault"


def test_what_waits_for_a_dead_generation_never_reaches_its_successor(net: Net) -> None:
    kv, scheduler = net.open(Role.KV), net.open(Role.SCHEDULER)
    net.settle()
    scheduler.close()
    assert kv.send(Role.SCHEDULER, encode(Matched(1, 0)))
    net.generations[Role.SCHEDULER] = 2
    successor = net.open(Role.SCHEDULER)
    net.settle()
    assert kv.send(Role.SCHEDULER, encode(Matched(2, 0)))
    arrival = receive(successor)
    assert arrival is not None
    assert isinstance(arrival.body, Matched)
    assert arrival.body.seq == 2


def test_a_frame_of_a_former_generation_is_fenced_and_reported(net: Net) -> None:
    kv, scheduler = net.open(Role.KV), net.open(Role.SCHEDULER)
    net.settle()
    assert kv.send(Role.SCHEDULER, encode(Matched(1, 0)))
    assert scheduler.mailbox.socket.poll(int(PATIENCE_S * 1000)), "it lies in the scheduler's mailbox"
    net.generations[Role.KV] = 2
    net.settle()
    assert kv.send(Role.SCHEDULER, encode(Matched(2, 0)))
    arrival = receive(scheduler)
    assert arrival is not None
    assert isinstance(arrival.body, Matched)
    assert arrival.body.seq == 2
    assert any("generation 1" in drop.why for drop in net.dropped)


def look(station: Station, source: Role) -> list[bytes]:
    """What a look at the mailbox shows, once something is there."""
    assert station.mailbox.socket.poll(int(PATIENCE_S * 1000))
    return [encode(body) for _, body in station.look(source)]


def test_what_was_looked_at_is_received_in_its_turn(net: Net) -> None:
    kv, scheduler, executor = net.open(Role.KV), net.open(Role.SCHEDULER), net.open(Role.EXECUTOR)
    net.settle()
    assert kv.send(Role.EXECUTOR, encode(Matched(1, 0)), b"beside")
    assert look(executor, Role.SCHEDULER) == []
    assert scheduler.send(Role.EXECUTOR, encode(Hasten(7)))
    assert look(executor, Role.SCHEDULER) == [encode(Hasten(7))]
    assert executor.look(Role.SCHEDULER) == [], "it is shown once"
    assert kv.send(Role.EXECUTOR, encode(Matched(2, 0)))
    assert executor.waiting
    arrivals = [receive(executor) for _ in range(3)]
    assert [arrival and arrival.frames for arrival in arrivals] == [
        [encode(Matched(1, 0)), b"beside"],
        [encode(Hasten(7))],
        [encode(Matched(2, 0))],
    ]
    assert not executor.waiting


def test_what_was_looked_at_is_judged_when_it_is_received(net: Net, context: Context) -> None:
    kv, executor = net.open(Role.KV), net.open(Role.EXECUTOR)
    net.settle()
    stranger = wire.Address(context, executor.mailbox.endpoint)
    assert stranger.send([b"rubbish", b""])
    assert look(executor, Role.KV) == []
    assert kv.send(Role.EXECUTOR, encode(Matched(1, 0)))
    assert look(executor, Role.KV) == [encode(Matched(1, 0))]
    net.generations[Role.KV] = 2
    net.settle()
    assert executor.receive() is None
    assert [drop.why for drop in net.dropped][1:] == ["from generation 1, but 2 is current"]
    assert kv.send(Role.EXECUTOR, encode(Matched(2, 0)))
    assert look(executor, Role.KV) == [encode(Matched(2, 0))]
    net.generations[Role.EXECUTOR] = 2
    net.settle()
    assert not executor.waiting, "what came to the former mailbox is void"
    stranger.close()


def test_a_new_generation_of_the_own_state_moves_the_mailbox_and_voids_it(net: Net) -> None:
    kv, scheduler = net.open(Role.KV), net.open(Role.SCHEDULER)
    net.settle()
    assert scheduler.send(Role.KV, STATE)
    assert kv.mailbox.socket.poll(int(PATIENCE_S * 1000))
    net.generations[Role.KV] = 2
    net.settle()
    assert kv.receive() is None
    assert kv.mailbox.endpoint.endswith("kv-0.2")
    assert scheduler.send(Role.KV, STATE)
    assert receive(kv) is not None


def test_a_frame_that_overtakes_go_brings_the_news_with_it(net: Net) -> None:
    kv, scheduler = net.open(Role.KV), net.open(Role.SCHEDULER)
    topology = net.topology()
    kv.control(topology)
    scheduler.control(topology)
    kv.control(Go(topology.epoch))
    assert kv.send(Role.SCHEDULER, STATE)
    arrival = receive(scheduler)
    assert arrival is not None
    assert PeerUp(Role.KV, 1).role in {peer.role for peer in arrival.news}
    assert scheduler.control(Go(topology.epoch)) == [], "Go has nothing to add"


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], [b"", b""], [b"not", b"msgpack", b"at all"]])
def test_rubbish_is_reported_and_what_follows_is_received(net: Net, context: Context, frames: list[bytes]) -> None:
    kv, scheduler = net.open(Role.KV), net.open(Role.SCHEDULER)
    net.settle()
    stranger = wire.Address(context, scheduler.mailbox.endpoint)
    assert stranger.send(frames)
    assert scheduler.mailbox.socket.poll(int(PATIENCE_S * 1000))
    assert scheduler.receive() is None
    assert kv.send(Role.SCHEDULER, STATE)
    assert receive(scheduler) is not None
    assert "undecodable" in net.dropped[0].why
    stranger.close()


def test_a_client_is_known_from_attach_until_it_is_gone(net: Net) -> None:
    tokenizer = net.open(Role.TOKENIZER)
    client = net.open(Role.CLIENT, name="chat")
    net.settle()
    submit = encode(Submit(client="chat", request_id="r", attempt=0, prompt=Text("x"), params=Params(), received_ns=0))
    client.send(Role.TOKENIZER, submit)
    client.send(Role.TOKENIZER, encode(Attach("chat", client.mailbox.endpoint)))
    client.send(Role.TOKENIZER, submit)
    first, second = receive(tokenizer), receive(tokenizer)
    assert first is not None
    assert isinstance(first.body, Attach)
    assert second is not None
    assert isinstance(second.body, Submit)
    assert ["not attached" in drop.why for drop in net.dropped] == [True]
    assert tokenizer.send(Role.CLIENT, STATE, name="chat")
    assert receive(client) is not None
    (gone,) = tokenizer.control(ClientGone("chat"))
    assert isinstance(gone, PeerDown)
    assert (gone.role, gone.name) == (Role.CLIENT, "chat")
    assert not tokenizer.send(Role.CLIENT, STATE, name="chat")


def test_an_event_loop_can_wait_for_messages(net: Net) -> None:
    tokenizer = net.open(Role.TOKENIZER)
    client = net.open(Role.CLIENT, name="chat")
    net.settle()
    wanted = 50

    async def talk() -> int:
        got = 0
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:

                async def send() -> None:
                    for i in range(wanted):
                        client.send(Role.TOKENIZER, encode(Cancel(str(i))))
                        await anyio.sleep(0.001 * (i % 3))

                tasks.start_soon(send)
                while got < wanted:
                    if tokenizer.receive() is None:
                        await tokenizer.wait()
                    else:
                        got += 1
        return got

    assert anyio.run(talk) == wanted


def test_a_socket_path_that_is_too_long_is_named_with_its_length(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="choose a shorter run_dir"):
        wire.endpoint(run_dir / ("x" * 90), Role.KV, 0, 1)
    longest = wire.endpoint(Path("/") / ("y" * (wire.PATH_LIMIT - 2 - len("/kv-0.1"))), Role.KV, 0, 1)
    assert len(longest.removeprefix("ipc://")) == wire.PATH_LIMIT - 1
