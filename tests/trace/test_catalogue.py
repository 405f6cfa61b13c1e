"""The catalogue: every event is explained, every written line is one of them, and the table is up to date."""

from __future__ import annotations

import inspect
from typing import Any, Union

import msgspec
import pytest

from octavo.core.trace import catalogue_doc
from octavo.core.trace.catalogue import Common, Event, catalogue
from octavo.core.trace.read import lines
from tests.trace.conftest import Loaded

COMMON = {field.name for field in msgspec.structs.fields(Common)}
UNSEEN = {
    # What a healthy run on the ghost may have no cause for.
    "actor.exited",
    "actor.restarted",
    "actor.stalled",
    "generation.bumped",
    "kv.leak",
    "kv.overdraft",
    "request.cancelled",
    "request.failed",
    "request.preempted",
    "request.rebased",
    "request.recovered",
    "request.resumed",
    "wire.dropped",
}


@pytest.mark.parametrize("name", catalogue())
def test_an_event_is_explained_and_does_not_hide_a_common_field(name: str) -> None:
    kind = catalogue()[name]
    assert inspect.getdoc(kind) not in (None, inspect.getdoc(kind.__base__)), f"{name} has no text of its own"
    assert not COMMON & {field.name for field in msgspec.structs.fields(kind)}


def test_every_line_of_a_real_run_is_one_event_with_exactly_its_fields(loaded: Loaded) -> None:
    event_type: Any = Union[tuple(catalogue().values())]  # noqa: UP007
    seen = set()
    for line in lines(loaded.path):
        own = {key: value for key, value in line.items() if key not in COMMON}
        msgspec.convert({key: line[key] for key in COMMON}, Common, strict=True)
        event: Event = msgspec.convert(own, event_type, strict=True)
        assert msgspec.to_builtins(event) == own
        seen.add(line["event"])
    assert seen >= {name for name in catalogue() if name.split(".")[0] in ("request", "step")} - UNSEEN
    assert seen <= catalogue().keys()


def test_the_table_of_events_is_up_to_date() -> None:
    assert catalogue_doc.TARGET.read_text(encoding="utf-8") == catalogue_doc.document(), (
        "run: python -m octavo.core.trace.catalogue_doc"
    )
