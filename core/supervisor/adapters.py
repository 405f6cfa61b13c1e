"""What the supervisor knows of LoRA adapters: which have a name, and which are being read.

It owns the names; what is behind one is content that an executor has read, with its digest. Requests are submitted with
both, so a name that changes hands changes nothing for those that have begun. A new name counts once the executor has
read the adapter, and everyone is told before the one who asked. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from octavo.core.control import (
    AWAY,
    TAKEN,
    UNKNOWN,
    UNREADABLE,
    AdapterLost,
    AdapterRead,
    Adapters,
    AdapterSet,
    ReadAdapter,
    SetAdapter,
)
from octavo.core.messages import Adapter


class Asked(NamedTuple):
    """A client's wish, while the executor reads."""

    identity: bytes
    wish: SetAdapter


class NamedAdapters:
    def __init__(self) -> None:
        self._named: dict[str, Adapter] = {}
        self._asked: dict[int, Asked] = {}
        self._numbers = count(1)

    def listing(self) -> Adapters:
        return Adapters(list(self._named.values()))

    def begin(self, adapters: Sequence[Adapter]) -> None:
        """Those of the configuration."""
        self._named = {adapter.name: adapter for adapter in adapters}

    def wish(self, identity: bytes, wish: SetAdapter) -> ReadAdapter | AdapterSet | None:
        """What the executor is to read, or the answer at once; None when a name was taken away."""
        if not wish.path:
            if self._named.pop(wish.name, None) is None:
                return AdapterSet(ref=wish.ref, why=f"there is no adapter {wish.name!r}", code=UNKNOWN)
            return None
        if (refusal := self._taken(wish)) is not None:
            return refusal
        number = next(self._numbers)
        self._asked[number] = Asked(identity, wish)
        return ReadAdapter(number=number, name=wish.name, path=wish.path)

    def read(self, answer: AdapterRead) -> tuple[bytes, AdapterSet] | None:
        """Whom to answer, and what, once everyone knows `listing`; None if nobody asked (any more)."""
        asked = self._asked.pop(answer.number, None)
        if asked is None:
            return None
        wish = asked.wish
        if answer.adapter is None:
            return asked.identity, AdapterSet(ref=wish.ref, why=answer.why, code=UNREADABLE)
        if (refusal := self._taken(wish)) is not None:  # meanwhile
            return asked.identity, refusal
        self._named[wish.name] = answer.adapter
        return asked.identity, AdapterSet(ref=wish.ref)

    def lost(self, lost: AdapterLost) -> bool:
        """Whether it had its name still, which it has no more."""
        if self._named.get(lost.adapter.name) != lost.adapter:
            return False
        del self._named[lost.adapter.name]
        return True

    def executor_lost(self) -> list[tuple[bytes, AdapterSet]]:
        """What was being read is not: its clients may ask again."""
        asked, self._asked = self._asked, {}
        why = "the executor was lost while it read the adapter; ask again"
        return [(one.identity, AdapterSet(ref=one.wish.ref, why=why, code=AWAY)) for one in asked.values()]

    def _taken(self, wish: SetAdapter) -> AdapterSet | None:
        if wish.replace or wish.name not in self._named:
            return None
        why = f"the adapter {wish.name!r} is loaded already; unload it first, or replace it (load_inplace)"
        return AdapterSet(ref=wish.ref, why=why, code=TAKEN)
