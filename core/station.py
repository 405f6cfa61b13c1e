"""One member's place on the data plane: its mailbox, the addresses of its peers, and the fences between.

Joins `wire` (sockets) and `links` (who is believed). Never blocks. A frame that is not delivered, in either
direction, is reported as `wire.dropped`; nothing is lost silently. Knows nothing of what messages mean, but that
`Attach` names a client's mailbox and that a client's messages carry its name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from octavo.core import wire
from octavo.core.control import ClientGone, Go, Member, QueueFull, ToMember, Topology, Who
from octavo.core.links import FENCED, Links
from octavo.core.messages import (
    PROTOCOL_VERSION,
    Attach,
    Body,
    Header,
    PeerDown,
    PeerUp,
    Role,
    decode,
)
from octavo.core.trace.catalogue import WireDropped

Report = Callable[[WireDropped], None]


class Arrival(NamedTuple):
    """A believed message. `news` is what the core must hear before it (see `Links.proves_go`); `frames` are the
    body as it came and whatever followed it."""

    news: list[PeerUp]
    header: Header
    body: Body
    frames: list[bytes]


class Station:
    """Use it from one thread. A client gives its `name`; an actor its `generation` (until a topology knows better)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_dir: Path,
        role: Role,
        report: Report,
        *,
        name: str = "",
        replica: int = 0,
        generation: int = 0,
    ) -> None:
        self.role = role
        self.replica = replica
        self.links = Links(role, generation)
        self._context = context
        self._run_dir = run_dir
        self._report = report
        self._peers: dict[Role, wire.Address] = {}
        self._clients: dict[str, wire.Address] = {}
        self._sequence = 0
        self._seen: deque[list[bytes]] = deque()
        """Messages that were looked at and not received yet."""
        self.full: list[QueueFull] = []
        """Peers whose queue was found full; for the owner to report, who empties it."""
        own = wire.endpoint(run_dir, role, replica, generation) if name == "" else wire.client_endpoint(run_dir, name)
        self.mailbox = wire.Mailbox(context, own)

    # ── control ──────────────────────────────────────────────────────────────────────────────────

    def control(self, message: ToMember) -> Sequence[PeerUp | PeerDown]:
        """Apply what the supervisor says; answer what the core should be told, in this order.

        A topology that gives the own state a new generation moves the mailbox: what waited in it is void.
        """
        match message:
            case Topology():
                before = self.links.generation
                down = self.links.announce(message)
                if self.links.generation != before:
                    self.mailbox.close()
                    self._seen.clear()
                    moved = wire.endpoint(self._run_dir, self.role, self.replica, self.links.generation)
                    self.mailbox = wire.Mailbox(self._context, moved)
                return self._disconnect(down)
            case Go(epoch):
                return self.links.go(epoch)
            case Who():
                return self._disconnect(self.links.reset())
            case ClientGone(name):
                address = self._clients.pop(name, None)
                if address is None:
                    return []
                address.close()
                return [PeerDown(Role.CLIENT, name)]
            case _:
                return []

    def _disconnect(self, news: list[PeerDown]) -> list[PeerDown]:
        for peer in news:
            address = self._peers.pop(peer.role, None)
            if address is not None:
                address.close()
        return news

    # ── data ─────────────────────────────────────────────────────────────────────────────────────

    def send(self, role: Role, body: bytes, *extra: bytes, name: str = "", dest_gen: int | None = None) -> bool:
        """False (and reported) if the link is down or its queue full. `name` picks a client; `dest_gen` is for
        an answer that only one generation of the peer may take."""
        if role in FENCED:
            member = self.links.reach(role, dest_gen)
            address = None if member is None else self._address(member)
            generation = 0 if member is None else member.generation
        else:
            address, generation = self._clients.get(name), 0
        if address is None:
            self._drop(role, name, "the link is down" if dest_gen is None else f"generation {dest_gen} is gone")
            return False
        self._sequence += 1
        own = self.links.generation
        now_ns = time.monotonic_ns()
        header = Header(PROTOCOL_VERSION, self.replica, self.role, own, generation, self._sequence, now_ns)
        if not address.send((wire.encode_header(header), body, *extra)):
            self._drop(role, name, f"its queue is full ({wire.HIGH_WATER} messages)")
            full = QueueFull(role=role, generation=generation, name=name)
            if full not in self.full:
                self.full.append(full)
            return False
        return True

    def _address(self, member: Member) -> wire.Address:
        address = self._peers.get(member.role)
        if address is not None and address.endpoint != member.endpoint:
            address.close()
            address = None
        if address is None:
            address = self._peers[member.role] = wire.Address(self._context, member.endpoint)
        return address

    def receive(self) -> Arrival | None:
        """The next message that is to be believed, or None when nothing (more) waits."""
        while (frames := self._seen.popleft() if self._seen else self.mailbox.receive()) is not None:
            arrival = self._judge(frames)
            if arrival is not None:
                return arrival
        return None

    def look(self, source: Role) -> list[tuple[Header, Body]]:
        """What has come from `source` since the last look, before its turn: `receive` gives all that has come in order,
        and judges it then."""
        found = []
        while (frames := self.mailbox.receive()) is not None:
            self._seen.append(frames)
            with suppress(msgspec.MsgspecError, IndexError):  # `receive` reports it
                header = wire.decode_header(frames[0])
                if header.source is source:
                    found.append((header, decode(frames[1])))
        return found

    @property
    def waiting(self) -> bool:
        """Whether something was looked at and not received yet: the mailbox's socket does not show it any more."""
        return bool(self._seen)

    async def wait(self) -> None:
        """Return once something may have come; only after `receive` gave None."""
        await self.mailbox.wait()

    def _judge(self, frames: list[bytes]) -> Arrival | None:
        try:
            header = wire.decode_header(frames[0])
            body = decode(frames[1])
        except (msgspec.MsgspecError, IndexError) as error:
            self._report(WireDropped(peer="?", why=f"undecodable: {error}"))
            return None
        proof = self.links.proves_go(header)
        news = [] if proof is None else self.links.go(proof.epoch)
        why = self.links.refusal(header)
        if why is None and header.source not in FENCED:
            why = self._stranger(body)
        if why is not None:
            self._drop(header.source, "", why)
            return None
        return Arrival(news, header, body, frames[1:])

    def _stranger(self, body: Body) -> str | None:
        """Clients are known by name: one must attach first, and is forgotten when it is gone."""
        if isinstance(body, Attach):
            if body.client not in self._clients:
                self._clients[body.client] = wire.Address(self._context, body.endpoint)
            return None
        name = getattr(body, "client", None)
        return f"client {name} is not attached" if name is not None and name not in self._clients else None

    def _drop(self, role: Role, name: str, why: str) -> None:
        peer = role.name.lower()
        self._report(WireDropped(peer=f"{peer} {name}".rstrip(), why=why))

    def close(self, linger_ms: int = 0) -> None:
        """Close every socket. What still waits may be sent for so long, while the context is terminated."""
        for address in (*self._peers.values(), *self._clients.values()):
            address.close(linger_ms)
        self.mailbox.close()
