"""What a core was told and what it answered, so that a replay can tell another core the same and compare.

A file an actor, of length-prefixed msgpack frames: `Started` when a core was made (anew for every generation), then an
`Applied` for every message it took. What it answered is kept as a digest. A full queue loses frames, and with them the
replay from there on: a `Lost` says so. A recording ends at a bound or with a full disk, for the rest of the run: it
would fill the disk of whoever forgot it. What there is of it is replayed as any other.

    record-scheduler-0.bin:  length (4 bytes, little-endian) | frame | length | frame | …

Contains the prompts' token ids. Encoding and writing are done by the trace's thread, never by the core's.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import msgspec

from octavo.core.machine import Outputs
from octavo.core.messages import Body, Facts, Message, Role, decode, encode
from octavo.core.trace.catalogue import RecordEnded
from octavo.core.trace.emit import Emitter
from octavo.core.trace.log import log

_LENGTH = struct.Struct("<I")


class Started(msgspec.Struct, tag=True, frozen=True):
    """A new core of this generation."""

    generation: int
    facts: Facts


class Applied(msgspec.Struct, tag=True, frozen=True):
    now_ns: int
    message: bytes
    digest: bytes
    clock: list[int]
    """What the core's clock said meanwhile, reading after reading: how long policies took is an input, too."""

    def body(self) -> Body:
        return decode(self.message)


class Lost(msgspec.Struct, tag=True, frozen=True):
    """This many messages were not recorded."""

    messages: int


Frame: TypeAlias = Started | Applied | Lost
Writing: TypeAlias = Callable[[], None]
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def record_path(run_dir: Path, role: Role, replica: int = 0) -> Path:
    return run_dir / f"record-{role.name.lower()}-{replica}.bin"


def digest(outputs: Outputs) -> bytes:
    """Of every byte that goes out, to whom, and of the next wake-up."""
    hashed = blake2b(repr(outputs.wakeup_ns).encode(), digest_size=8)
    for role, message, name in outputs.messages:
        hashed.update(f"{role.name} {name} ".encode())
        hashed.update(encode(message))
    return hashed.digest()


def frames(path: Path) -> Iterator[Frame]:
    """A recording's frames; one cut short by a process's death ends it."""
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if len(frame := file.read(length)) < length:
                return
            yield _decoder.decode(frame)


def _whole(path: Path) -> int:
    """Bytes of a recording up to its last whole frame."""
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if at + _LENGTH.size + length > size:
                break
            at = file.seek(length, os.SEEK_CUR)
    return at


class Recorder:
    """One actor's recording, of at most `limit` bytes. Does nothing but hand over: `emitter`'s thread writes."""

    def __init__(self, run_dir: Path, role: Role, emitter: Emitter, limit: int) -> None:
        self._emitter = emitter
        self._limit = limit
        self._full = False
        """Set by the writer: the frame that found no room was the end."""
        self._told = False
        self._lost = 0
        self._readings: list[int] = []
        path = record_path(run_dir, role)
        path.touch(mode=0o600)
        self._file = path.open("r+b", buffering=0)
        self._file.truncate(_whole(path))  # a process that died while it wrote
        self._size = self._file.seek(0, os.SEEK_END)

    def started(self, generation: int, facts: Facts) -> None:
        self._put(lambda: self._write(Started(generation, facts)))

    def clock(self) -> int:
        """ns, for a core; remembers what it said."""
        now = time.perf_counter_ns()
        self._readings.append(now)
        return now

    def applied(self, now_ns: int, message: Message, outputs: Outputs) -> None:
        """Neither `message` nor `outputs` may be changed afterwards."""
        readings, self._readings = self._readings, []
        self._put(lambda: self._write(Applied(now_ns, encode(message), digest(outputs), readings)))

    def close(self) -> None:
        """After `emitter` was closed: it may still have had something to write."""
        self._file.close()

    def _put(self, write: Writing) -> None:
        if self._full:
            if not self._told:
                self._emitter.emit(RecordEnded(bytes=self._size))
                self._told = True
            return
        if self._lost and self._emitter.defer(self._confession(self._lost)):
            self._lost = 0
        if self._lost or not self._emitter.defer(write):
            self._lost += 1

    def _confession(self, lost: int) -> Writing:
        return lambda: self._write(Lost(lost))

    def _write(self, frame: Frame) -> None:
        body = msgspec.msgpack.encode(frame)
        if self._full or self._size + _LENGTH.size + len(body) > self._limit:
            self._full = True
            return
        data = _LENGTH.pack(len(body)) + body
        try:
            whole = self._file.write(data) == len(data)
        except OSError:
            whole = False
        if whole:
            self._size += len(data)
        else:  # a full disk is a bound, too
            log().warning(f"{self._file.name} ends here: it cannot be written any more")
            self._full = True
            self._file.truncate(self._size)
