"""Replays a recorded run: fresh cores are told what the recorded ones were told, and must answer the same, bit for bit.

With other policies the first answer that differs is shown, beside what the recorded policies answer in the same
moment; from there on the recording no longer fits, since the world would have answered otherwise. Pure: it reads
frames and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from octavo.core.config.schema import Config
from octavo.core.kv.build import build as build_kv
from octavo.core.machine import Core, Outputs
from octavo.core.messages import Body, Facts, Role
from octavo.core.scheduler.build import build as build_scheduler
from octavo.core.trace.catalogue import Event
from octavo.core.trace.record import Applied, Frame, Lost, Started, digest

Build: TypeAlias = Callable[[Config, Facts, int, Callable[[], int]], Core]
BUILDERS: dict[Role, Build] = {Role.SCHEDULER: build_scheduler, Role.KV: build_kv}


class RecordedClock:
    """Says what the recorded core's clock said; asked more often than that, it stands still."""

    def __init__(self) -> None:
        self._readings: list[int] = []
        self._last = 0

    def load(self, readings: list[int]) -> None:
        self._readings = readings[::-1]

    def __call__(self) -> int:
        if self._readings:
            self._last = self._readings.pop()
        return self._last


class Difference(msgspec.Struct, frozen=True):
    """The first answer that is not the recorded one."""

    number: int
    """Of the message since the recording began, from 1."""
    now_ns: int
    message: str
    recorded: list[str]
    """What the recorded configuration says happens, event by event; empty if it does not give the record either."""
    replayed: list[str]


class Replayed(msgspec.Struct, frozen=True):
    role: str
    cores: int
    """Made, one a generation."""
    messages: int
    plans: int
    """Answers with a message in them: plans, binds, deltas."""
    difference: Difference | None = None
    lost: int = 0
    """Messages that the recording had no room for; what came after them is not replayed."""

    @property
    def same(self) -> bool:
        return self.difference is None and not self.lost


def replay(role: Role, frames: Iterable[Frame], config: Config, recorded: Config) -> Replayed:
    """`config` is what to replay with, `recorded` what the run had."""
    build = BUILDERS[role]
    clock, reference_clock = RecordedClock(), RecordedClock()
    cores = messages = plans = 0
    core: Core | None = None
    reference: Core | None = None
    """With the recorded configuration, to show what it does where `config` differs."""
    for frame in frames:
        match frame:
            case Started():
                cores += 1
                core = build(config, frame.facts, frame.generation, clock)
                reference = None
                if config != recorded:
                    reference = build(recorded, frame.facts, frame.generation, reference_clock)
            case Lost():
                return Replayed(role.name.lower(), cores, messages, plans, lost=frame.messages)
            case Applied() if core is not None:
                messages += 1
                clock.load(frame.clock)
                reference_clock.load(frame.clock)
                body = frame.body()
                outputs = core.apply(frame.now_ns, body)
                expected = None if reference is None else reference.apply(frame.now_ns, frame.body())
                plans += bool(outputs.messages)
                if digest(outputs) != frame.digest:
                    difference = _difference(messages, frame, body, outputs, expected)
                    return Replayed(role.name.lower(), cores, messages, plans, difference)
            case Applied():
                raise ValueError(f"{role.name.lower()}: the recording has a message before its core was made")
    return Replayed(role.name.lower(), cores, messages, plans)


def _difference(number: int, frame: Applied, body: Body, outputs: Outputs, expected: Outputs | None) -> Difference:
    known = expected is not None and digest(expected) == frame.digest
    return Difference(
        number,
        frame.now_ns,
        type(body).__name__,
        _words(expected) if known and expected is not None else [],
        _words(outputs),
    )


def _words(outputs: Outputs) -> list[str]:
    """What happened and what goes out, a line each."""
    return [_event(event) for event in outputs.events] + [
        f"→ {out.role.name.lower()}: {_short(out.message)}" for out in outputs.messages
    ]


def _event(event: Event) -> str:
    fields = msgspec.to_builtins(event)
    return f"{fields.pop('event')} " + " ".join(f"{key}={value}" for key, value in fields.items())


def _short(message: msgspec.Struct) -> str:
    """A message with its columns, cut where they are long."""
    parts = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        text = str(value.tolist()) if hasattr(value, "tolist") else repr(value)
        if text not in ("[]", "None"):
            parts.append(f"{name}={text if len(text) <= 60 else text[:57] + '...'}")
    return f"{type(message).__name__} {' '.join(parts)}"
