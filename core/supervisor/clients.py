"""The clients the supervisor knows: told of every topology, and reported to the tokenizer when they are gone."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.control import ClientGone
from octavo.core.supervisor.actions import Action, Tell


@dataclass(slots=True)
class _Client:
    name: str
    heard_ns: int
    supervised: bool
    """Its process is a child: its death is seen, so its silence means nothing here."""


class Clients:
    """Keyed by routing identity. `tokenizer` is that of the one to tell, None while there is none to care."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Client] = {}

    def add(self, name: str, identity: bytes, now_ns: int, *, supervised: bool) -> None:
        self._known[identity] = _Client(name, now_ns, supervised)

    def heard(self, identity: bytes, now_ns: int) -> bool:
        """Whether it is known."""
        client = self._known.get(identity)
        if client is not None:
            client.heard_ns = now_ns
        return client is not None

    def forgive(self, now_ns: int) -> None:
        """The supervisor was held up: nobody was silent."""
        for client in self._known.values():
            client.heard_ns = now_ns

    def lose(self, identity: bytes, tokenizer: bytes | None) -> list[Action]:
        """It left, or its process died."""
        client = self._known.pop(identity, None)
        if client is None or tokenizer is None:
            return []
        return [Tell(tokenizer, ClientGone(client.name))]

    def lose_named(self, name: str, tokenizer: bytes | None) -> list[Action]:
        """It takes nothing any more. If it goes on it is asked `Who`, attaches again and says what it has."""
        identities = [identity for identity, client in self._known.items() if client.name == name]
        return [action for identity in identities for action in self.lose(identity, tokenizer)]

    def expire(self, now_ns: int, timeout_s: float, tokenizer: bytes | None) -> list[Action]:
        """Those that were silent too long are gone."""
        silent = [
            identity
            for identity, client in self._known.items()
            if not client.supervised and now_ns - client.heard_ns > timeout_s * 1e9
        ]
        return [action for identity in silent for action in self.lose(identity, tokenizer)]

    def identities(self) -> list[bytes]:
        return list(self._known)
