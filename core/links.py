"""What one member knows of its links: which peers it may speak to, and whose frames it believes.

Pure. Takes the supervisor's Topology and Go, answers with what the member's core should be told (PeerDown,
PeerUp), and judges headers. A link is fenced by its two ends: it lives as long as neither end's state
generation changes. Clients have no generations; see `station` for how they are known by name.
"""

from __future__ import annotations

from octavo.core.control import Go, Member, Topology
from octavo.core.messages import PROTOCOL_VERSION, Header, PeerDown, PeerUp, Role

FENCED = frozenset({Role.TOKENIZER, Role.SCHEDULER, Role.KV, Role.EXECUTOR})
"""Roles on the data plane whose state has a generation."""


class Links:
    """`generation` is the own state's, as of the last topology; always 0 for a client or a gateway."""

    def __init__(self, role: Role, generation: int = 0) -> None:
        self.role = role
        self.generation = generation if role in FENCED else 0
        self._live: dict[Role, Member] = {}
        self._announced: Topology | None = None

    def announce(self, topology: Topology) -> list[PeerDown]:
        """Take a topology: links with a changed end are down from now on. Up is only for Go to say."""
        own = topology.member(self.role) if self.role in FENCED else None
        cut = own is not None and (own.generation != self.generation or not own.up)
        if own is not None:
            self.generation = own.generation
        self._announced = topology
        return self._drop([role for role, member in self._live.items() if cut or topology.member(role) != member])

    def go(self, epoch: int) -> list[PeerUp]:
        """Everyone has acknowledged `epoch`: the links it announced are up. Stale epochs change nothing.

        The far end of the pipeline comes first, so that a core that is told of its peers one by one never
        sends a step towards a peer whose own next hop it still thinks down.
        """
        if self._announced is None or epoch != self._announced.epoch:
            return []
        fresh = [member for member in self._peers() if member.role not in self._live]
        fresh.sort(key=lambda member: member.role, reverse=True)
        self._live.update({member.role: member for member in fresh})
        return [PeerUp(member.role, member.generation) for member in fresh]

    def reset(self) -> list[PeerDown]:
        """The supervisor no longer knew us: nothing is up until its next Go."""
        self._announced = None
        return self._drop(list(self._live))

    def live(self, role: Role) -> Member | None:
        """The peer's end of a link that may be used now."""
        return self._live.get(role)

    def reach(self, role: Role, generation: int | None = None) -> Member | None:
        """The peer to send to, or None while it is down. An answer meant for one `generation` may go to it as soon
        as it is announced: who asked must have been told Go."""
        if generation is None:
            return self._live.get(role)
        return next((peer for peer in self._peers() if (peer.role, peer.generation) == (role, generation)), None)

    def proves_go(self, header: Header) -> Go | None:
        """Nothing is sent on a changed link before Go, so a frame of the announced generation can only have been
        sent after it: the supervisor's own word to us is still on its way. Answers that Go."""
        if self._announced is None or header.source in self._live or header.dest_gen != self.generation:
            return None
        announced = self.reach(header.source, header.source_gen)
        return None if announced is None else Go(self._announced.epoch)

    def refusal(self, header: Header) -> str | None:
        """Why this frame must not be believed; None if it may."""
        if header.version != PROTOCOL_VERSION:
            return f"protocol version {header.version}, but {PROTOCOL_VERSION} is spoken here"
        if header.dest_gen != self.generation:
            return f"meant for generation {header.dest_gen}, but this is {self.generation}"
        if header.source not in FENCED:
            return None
        member = self._live.get(header.source)
        if member is None:
            return "the link is down"
        if member.generation != header.source_gen:
            return f"from generation {header.source_gen}, but {member.generation} is current"
        return None

    def _peers(self) -> list[Member]:
        """The other ends of links that are announced with both ends up."""
        if self._announced is None:
            return []
        own = self._announced.member(self.role) if self.role in FENCED else None
        if own is not None and not own.up:
            return []
        return [member for member in self._announced.members if member.up and member.role is not self.role]

    def _drop(self, roles: list[Role]) -> list[PeerDown]:
        for role in roles:
            del self._live[role]
        return [PeerDown(role) for role in sorted(roles)]
