"""Who has which name: the supervisor's part, without processes."""

from __future__ import annotations

from octavo.core.control import (
    AWAY,
    TAKEN,
    UNKNOWN,
    UNREADABLE,
    AdapterLost,
    AdapterRead,
    AdapterSet,
    ReadAdapter,
    SetAdapter,
)
from octavo.core.messages import Adapter
from octavo.core.supervisor.adapters import NamedAdapters

RED, BLUE = Adapter("red", "/red", b"r" * 16), Adapter("blue", "/blue", b"b" * 16)


def wish(ref: int, name: str, path: str = "", *, replace: bool = False) -> SetAdapter:
    return SetAdapter(ref=ref, name=name, path=path, replace=replace)


def reading(names: NamedAdapters, asked: SetAdapter, who: bytes = b"c") -> ReadAdapter:
    answer = names.wish(who, asked)
    assert isinstance(answer, ReadAdapter)
    return answer


def test_a_name_counts_once_the_executor_has_read_it() -> None:
    names = NamedAdapters()
    asked = reading(names, wish(7, "red", "/red"))
    assert names.listing().adapters == []
    assert names.read(AdapterRead(number=asked.number, adapter=RED)) == (b"c", AdapterSet(ref=7))
    assert names.listing().adapters == [RED]
    assert names.read(AdapterRead(number=asked.number, adapter=BLUE)) is None, "it was answered"
    assert names.listing().adapters == [RED]


def test_what_cannot_be_read_changes_nothing() -> None:
    names = NamedAdapters()
    names.begin([RED])
    asked = reading(names, wish(1, "red", "/other", replace=True))
    assert names.read(AdapterRead(number=asked.number, why="it is none")) == (
        b"c",
        AdapterSet(ref=1, why="it is none", code=UNREADABLE),
    )
    assert names.listing().adapters == [RED]


def test_of_two_who_want_a_name_the_first_has_it() -> None:
    names = NamedAdapters()
    first, second = reading(names, wish(1, "red", "/red")), reading(names, wish(2, "red", "/blue"), b"d")
    assert names.read(AdapterRead(number=first.number, adapter=RED)) == (b"c", AdapterSet(ref=1))
    later = names.read(AdapterRead(number=second.number, adapter=Adapter("red", "/blue", b"b" * 16)))
    assert later is not None
    assert (later[0], later[1].code) == (b"d", TAKEN)
    assert names.listing().adapters == [RED]
    at_once = names.wish(b"d", wish(3, "red", "/blue"))
    assert isinstance(at_once, AdapterSet)
    assert at_once.code == TAKEN


def test_an_executor_that_dies_answers_nobody_so_the_supervisor_does() -> None:
    names = NamedAdapters()
    asked = reading(names, wish(4, "red", "/red"))
    assert [(who, answer.ref, answer.code) for who, answer in names.executor_lost()] == [(b"c", 4, AWAY)]
    assert names.read(AdapterRead(number=asked.number, adapter=RED)) is None
    assert names.executor_lost() == []


def test_names_are_taken_away_and_lost() -> None:
    names = NamedAdapters()
    names.begin([RED, BLUE])
    assert names.wish(b"c", wish(1, "red")) is None
    gone = names.wish(b"c", wish(2, "red"))
    assert isinstance(gone, AdapterSet)
    assert gone.code == UNKNOWN
    assert not names.lost(AdapterLost(adapter=Adapter("blue", "/blue", b"o" * 16), why="")), "it is another by now"
    assert names.lost(AdapterLost(adapter=BLUE, why=""))
    assert names.listing().adapters == []
