"""Makes EVENTS.md, the table of events, of the catalogue: `python -m octavo.core.trace.catalogue_doc`."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec

from octavo.core.trace.catalogue import Common, Event, catalogue

TARGET = Path(__file__).parent / "EVENTS.md"

_HEAD = """# Events

Every line of a run's `trace-<role>-<replica>.jsonl` is one of these. This file is made of `catalogue.py` by
`python -m octavo.core.trace.catalogue_doc`; do not edit it.

Every line has `event` (the name) and

{common}

{about}

| event | fields | what it says |
|---|---|---|
"""


def document() -> str:
    """The whole file."""
    return _HEAD.format(common=_fields(Common), about=_text(Common)) + "".join(
        f"| `{name}` | {_fields(kind)} | {_text(kind).replace('|', chr(92) + '|')} |\n"
        for name, kind in catalogue().items()
    )


def _fields(kind: type[Event | Common]) -> str:
    hints = inspect.get_annotations(kind)
    for base in kind.__mro__[1:]:
        if isinstance(base, type) and issubclass(base, msgspec.Struct):
            hints = {**inspect.get_annotations(base), **hints}
    names = [field.name for field in msgspec.structs.fields(kind)]
    return ", ".join(f"`{name}`: {str(hints[name]).replace('|', 'or')}" for name in names)


def _text(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
