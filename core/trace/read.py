"""Reads a run's trace files back: as plain fields, or as the catalogue's types.

A line that a process's death cut short, or that another version of Octavo wrote, is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Union

import msgspec

from octavo.core.rundir import base, runs
from octavo.core.trace.catalogue import Common, Event, catalogue


class Line(NamedTuple):
    """One event and what is common to all."""

    ts_ns: int
    spent_ns: int
    role: str
    generation: int
    event: Event


class NoSuchRun(Exception):
    """There is no trace to read; the text says where it was looked for."""


_common = msgspec.json.Decoder(Common)
_event: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Union[tuple(catalogue().values())])  # noqa: UP007


def find(run: Path | None) -> Path:
    """The run folder that is meant: this one, or that of the newest run that could serve. Only if there is none, that
    of the newest start."""
    if run is not None:
        if not any(run.glob("trace-*.jsonl")):
            raise NoSuchRun(f"there is no trace in {run}")
        return run
    known = runs()
    if not known:
        raise NoSuchRun(f"there is no run in {base()}; if yours has another run_dir, name it with --run")
    return next((info for info in known if info.ready), known[0]).path


def lines(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Every event of a run as its fields, file after file."""
    for text in _texts(run_dir):
        try:
            yield msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:
            continue


def records(run_dir: Path) -> list[Line]:
    """Every event of a run, in order of time."""
    with _no_collection():
        return sorted(_records(run_dir), key=lambda line: line.ts_ns)


def parse(text: bytes) -> Line:
    """One line. Raises `msgspec.MsgspecError` if it is none of the catalogue's."""
    common, event = _common.decode(text), _event.decode(text)
    return Line(common.ts_ns, common.spent_ns, common.role, common.generation, event)


def _records(run_dir: Path) -> Iterator[Line]:
    for text in _texts(run_dir):
        try:
            yield parse(text)
        except msgspec.MsgspecError:
            continue


def _texts(run_dir: Path) -> Iterator[bytes]:
    for path in sorted(run_dir.glob("trace-*.jsonl")):
        with path.open("rb") as file:
            yield from file


@contextmanager
def _no_collection() -> Iterator[None]:
    """Many small objects that all stay: looking for garbage among them only takes time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
