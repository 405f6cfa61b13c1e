"""A request's life as spans: one for each choice, one below it for each phase, and preemptions as events of it.

As OTLP's JSON has them (opentelemetry-proto 1.x, "JSON Protobuf Encoding"): ids in hexadecimal, 64-bit numbers as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from octavo.core.trace.catalogue import RequestTokenized
from octavo.core.trace.life import Life, Piece, lives
from octavo.core.trace.run import Run
from octavo.plugins.otel import names

Value: TypeAlias = str | int | float | list[str]

SERVER, INTERNAL = 2, 1
OK, ERROR = 1, 2


class Attribute(msgspec.Struct):
    key: str
    value: dict[str, Any]


class SpanEvent(msgspec.Struct, rename="camel"):
    time_unix_nano: str
    name: str
    attributes: list[Attribute]


class Status(msgspec.Struct):
    code: int
    message: str = ""


class Span(msgspec.Struct, rename="camel", omit_defaults=True):
    trace_id: str
    span_id: str
    name: str
    kind: int
    start_time_unix_nano: str
    end_time_unix_nano: str
    attributes: list[Attribute]
    parent_span_id: str = ""
    events: list[SpanEvent] = []
    status: Status | None = None


def spans(run: Run, model: str, wall_ns: int) -> Iterator[Span]:
    """Of every request that is over. `wall_ns` is what to add to monotonic times."""
    for request_id in run.requests:
        asked = next(
            (line.event for line in run.requests[request_id] if isinstance(line.event, RequestTokenized)), None
        )
        for life in lives(run, request_id):
            if life.end_ns is not None:
                yield from _of_life(life, asked, model, wall_ns)


def _of_life(life: Life, asked: RequestTokenized | None, model: str, wall_ns: int) -> Iterator[Span]:
    assert life.end_ns is not None  # the caller looked
    trace, own = trace_id(life), span_id(life, "")
    failed = life.finish not in ("stop", "length", "cancelled")
    yield Span(
        trace_id=trace,
        span_id=own,
        name=f"{names.TEXT_COMPLETION} {model}",
        kind=SERVER,
        start_time_unix_nano=str(life.received_ns + wall_ns),
        end_time_unix_nano=str(life.end_ns + wall_ns),
        attributes=attributes(_facts(life, asked, model)),
        events=[
            SpanEvent(
                str(ts_ns + wall_ns),
                "octavo.preempted",
                attributes({names.BY: event.by, names.LOST: event.lost}),
            )
            for event, ts_ns in life.preempted
        ],
        status=Status(ERROR, life.finish) if failed else Status(OK),
    )
    for number, (phase, group) in enumerate(groupby(life.pieces, key=lambda piece: piece.phase)):
        pieces = list(group)
        yield Span(
            trace_id=trace,
            span_id=span_id(life, f"{number} {phase}"),
            parent_span_id=own,
            name=phase,
            kind=INTERNAL,
            start_time_unix_nano=str(pieces[0].start_ns + wall_ns),
            end_time_unix_nano=str(pieces[-1].end_ns + wall_ns),
            attributes=attributes(_cause(pieces)),
        )


def _facts(life: Life, asked: RequestTokenized | None, model: str) -> dict[str, Value | None]:
    done, taken = life.finished, life.taken
    return {
        names.OPERATION: names.TEXT_COMPLETION,
        names.PROVIDER: "octavo",
        names.MODEL: model,
        names.RESPONSE_ID: life.who.request_id,
        names.MAX_TOKENS: None if asked is None else asked.max_tokens,
        names.CHOICES: None if asked is None else asked.n,
        names.FINISH: [life.finish] if life.finish else None,
        names.INPUT_TOKENS: None if done is None else done.prompt_tokens,
        names.CACHED_TOKENS: None if done is None else done.cached,
        names.OUTPUT_TOKENS: None if done is None else done.output_tokens,
        names.PREEMPTIONS: None if done is None else done.preemptions,
        names.FIRST_TOKEN: None if life.ttft_ns is None else life.ttft_ns / 1e9,
        names.PER_TOKEN: None if taken is None or taken.tpot_ns is None else taken.tpot_ns / 1e9,
        names.MISS: None if life.matched is None else life.matched.miss or None,
        names.TENANT: life.tenant or None,
        names.CHOICE: life.who.choice,
    }


def _cause(pieces: list[Piece]) -> dict[str, Value | None]:
    """What most of these pieces' time went on."""
    took: dict[str, int] = {}
    for piece in pieces:
        took[piece.cause] = took.get(piece.cause, 0) + piece.took_ns
    most = max(took, key=lambda cause: took[cause])
    longest = max((piece for piece in pieces if piece.cause == most), key=lambda piece: piece.took_ns)
    return {names.CAUSE: most, names.CAUSE_SECONDS: took[most] / 1e9, names.NOTE: longest.note or None}


def attributes(facts: dict[str, Value | None]) -> list[Attribute]:
    """Those that are known."""
    return [Attribute(key, _value(value)) for key, value in facts.items() if value is not None]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(one) for one in value]}}
        case _:
            return {"stringValue": value}


def trace_id(life: Life) -> str:
    """The caller's, if it was a W3C one; else made of what the request was called."""
    if re.fullmatch(r"[0-9a-f]{32}", life.trace_id) and life.trace_id.strip("0"):
        return life.trace_id
    return sha256((life.trace_id or life.who.request_id).encode()).hexdigest()[:32]


def span_id(life: Life, part: str) -> str:
    """The same whenever it is exported."""
    return sha256(f"{life.who.request_id} {life.who.choice} {part}".encode()).hexdigest()[:16]
