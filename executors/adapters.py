"""The LoRA adapters that an executor holds, by content: read once, kept as long as one has a name or is in use.

A request says what it is to be computed with by digest. So it is never computed with anything else: an adapter that is
not held is read again where it was, and what lies there now counts only if it is the same. Knows no arithmetic: what
an adapter is prepared to is the executor's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from octavo.core.messages import Adapter
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import absolute


class Readable(Protocol):
    """An adapter as read; `digest` is of what it does: 16 bytes."""

    @property
    def digest(self) -> bytes: ...


class Content(NamedTuple):
    """One of which only the digest is known."""

    digest: bytes


C = TypeVar("C", bound=Readable)
P = TypeVar("P")


class AdapterError(ModelError):
    """An adapter that cannot be had any more."""


class Holds(Protocol):
    """What the executor's process needs of them."""

    @property
    def nbytes(self) -> int:
        """Memory that all of them take."""
        ...

    def load(self, name: str, path: str) -> Adapter:
        """Raises `ModelError` with what is wrong with it."""
        ...

    def listed(self, adapters: Sequence[Adapter]) -> list[tuple[Adapter, str]]:
        """These have a name now: the ones that cannot be had, and why."""
        ...


def numbered(adapters: Sequence[Adapter | None]) -> tuple[list[Adapter], list[int]]:
    """Each adapter once, those of one content being one; and by place which it is of these, -1 where there is none."""
    named = {adapter.digest: adapter for adapter in adapters if adapter is not None}
    numbers = {digest: number for number, digest in enumerate(named)}
    return list(named.values()), [-1 if adapter is None else numbers[adapter.digest] for adapter in adapters]


class Finds(Protocol):
    def missing(self, adapter: Adapter) -> str | None:
        """Why it cannot be had; None if it is held, if need be read again."""
        ...


class Adapters(Generic[C, P]):
    """`read` reads a path, and `prepare` makes of it what the executor computes with; both raise `ModelError`.
    `in_use` tells the digests that residents have, `size` the bytes that one takes."""

    def __init__(
        self,
        read: Callable[[Path], C],
        prepare: Callable[[C], P],
        in_use: Callable[[], set[bytes]] = set,
        size: Callable[[P], int] = lambda _: 0,
    ) -> None:
        self._read = read
        self._prepare = prepare
        self._in_use = in_use
        self._size = size
        self._held: dict[bytes, P] = {}
        self._named: set[bytes] = set()
        """Digests of those that have a name, or were read to get one."""

    @property
    def nbytes(self) -> int:
        return sum(map(self._size, self._held.values()))

    @property
    def held(self) -> dict[bytes, P]:
        """By digest."""
        return dict(self._held)

    def load(self, name: str, path: str) -> Adapter:
        adapter = self._had(name, path)
        self._named.add(adapter.digest)
        return adapter

    def listed(self, adapters: Sequence[Adapter]) -> list[tuple[Adapter, str]]:
        self._named = {adapter.digest for adapter in adapters}
        self._drop()
        return [(adapter, why) for adapter in adapters if (why := self.missing(adapter)) is not None]

    def missing(self, adapter: Adapter) -> str | None:
        if adapter.digest in self._held:
            return None
        try:
            found = self._had(adapter.name, adapter.path)
        except ModelError as error:
            return f"the adapter {adapter.name!r} is not held any more: {error}"
        if found.digest != adapter.digest:
            return (
                f"the adapter {adapter.name!r} is not held any more, and {adapter.path} has other content now "
                f"({found.digest.hex()[:8]}, not {adapter.digest.hex()[:8]})"
            )
        return None

    def of(self, adapter: Adapter) -> P:
        """Raises `AdapterError`."""
        if (why := self.missing(adapter)) is not None:
            raise AdapterError(why)
        return self._held[adapter.digest]

    def _had(self, name: str, path: str) -> Adapter:
        """What lies there, held."""
        where = absolute(path)
        try:
            content = self._read(where)
            if content.digest not in self._held:
                self._drop()  # of those that were in use when they lost their names some may have ended
                self._held[content.digest] = self._prepare(content)
        except OSError as error:
            raise ModelError(f"{error.filename or where} cannot be read: {error.strerror}") from error
        return Adapter(name, str(where), content.digest)

    def _drop(self) -> None:
        for digest in self._held.keys() - self._named - self._in_use():
            del self._held[digest]
