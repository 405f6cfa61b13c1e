"""Workloads from files: Octavo's own JSONL, the Mooncake trace, and what a run of the daemon left behind.

Own format, one JSON object a line, times in seconds:

    {"arrival_s": 0.2, "input_length": 300, "output_length": 40,            lengths alone: no prompt shares anything
     "hash_ids": [7, 9, 12], "block": 128}                                 or ids of the prompt's blocks of 128 tokens
    {"arrival_s": 0.9, "ids": [1, 2, 3], "output_length": 40, "tenant": "a", "priority": 1, "deadline_s": 2.0,
     "n": 2, "max_tokens": 200,                     asked for two choices of 200 tokens, stopped after 40 by its client
     "cancel_s": 3.0}                                                      and given up 3 s after it was asked, if ever

Mooncake (one object a line): {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
the timestamp in milliseconds, hash_ids of blocks of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from octavo.core.messages import Cancel, Col, Enqueue, Role, col
from octavo.core.trace.read import lines
from octavo.core.trace.record import Applied, frames, record_path
from octavo.plugins.sim.workload import Segment, Session, Turn

MOONCAKE_BLOCK = 512
_UNSHARED = 1 << 50
"""Seeds of the parts of prompts that no hash id stands for."""

Length = Annotated[int, msgspec.Meta(ge=1)]


class TraceError(ValueError):
    """A file that is no workload; the message says where and why."""


class _Own(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    arrival_s: Annotated[float, msgspec.Meta(ge=0)]
    output_length: Length
    input_length: Length | None = None
    hash_ids: list[int] | None = None
    block: Length = MOONCAKE_BLOCK
    ids: list[int] | None = None
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    request_id: str = ""
    n: Length = 1
    max_tokens: Length | None = None
    cancel_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class _Mooncake(msgspec.Struct, kw_only=True):
    timestamp: float
    input_length: Length
    output_length: int
    hash_ids: list[int]


def load(path: Path) -> list[Session]:
    """The requests of a file or of a run's folder, in order of arrival, the first at time 0."""
    if path.is_dir():
        sessions = _recorded(path) if record_path(path, Role.SCHEDULER).exists() else _traced(path)
        if not sessions:
            raise TraceError(f"{path}: no request in its trace that was tokenized and finished")
    else:
        try:
            with path.open("rb") as file:
                sessions = list(_parse(path, file))
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror}") from None
        if not sessions:
            raise TraceError(f"{path}: empty")
    sessions.sort(key=lambda session: session.start_s)
    return _from_zero(sessions)


def _from_zero(sessions: list[Session]) -> list[Session]:
    first = sessions[0].start_s
    return [Session(s.start_s - first, s.turns, s.tenant, s.priority, s.deadline_s) for s in sessions]


def _parse(path: Path, file: Iterable[bytes]) -> Iterator[Session]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            keys = msgspec.json.decode(line, type=dict[str, Any])
            yield _mooncake(line, number) if "timestamp" in keys else _own(line, number)
        except (msgspec.MsgspecError, TraceError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None


def _mooncake(line: bytes, number: int) -> Session:
    one = msgspec.json.decode(line, type=_Mooncake)
    new = _blocks(one.hash_ids, MOONCAKE_BLOCK, one.input_length, number)
    return Session(one.timestamp / 1000, (Turn(new, max(1, one.output_length)),))


def _own(line: bytes, number: int) -> Session:
    one = msgspec.json.decode(line, type=_Own)
    new: Col | tuple[Segment, ...]
    if one.ids:
        new = col(one.ids)
    elif one.input_length is None:
        raise TraceError("needs ids, or input_length (with hash_ids if prompts share anything)")
    else:
        new = _blocks(one.hash_ids or [], one.block, one.input_length, number)
    limit = one.max_tokens or one.output_length
    if limit < one.output_length:
        raise TraceError(f"output_length {one.output_length} is more than max_tokens {limit}")
    others = (one.output_length,) * (one.n - 1)
    turn = Turn(new, one.output_length, name=one.request_id, others=others, limit=limit, cancel_s=one.cancel_s)
    return Session(one.arrival_s, (turn,), one.tenant, one.priority, one.deadline_s)


def _blocks(hash_ids: list[int], block: int, length: int, number: int) -> tuple[Segment, ...]:
    """A segment a hash id, the last one cut; what no id stands for is this request's own."""
    starts = range(0, length, block)
    whole = [Segment(hash_id, min(block, length - start)) for hash_id, start in zip(hash_ids, starts, strict=False)]
    rest = length - sum(segment.n for segment in whole)
    return (*whole, Segment(_UNSHARED + number, rest)) if rest else tuple(whole)


def _recorded(run: Path) -> list[Session]:
    """From what `trace.record` wrote: the requests as they were, with their token ids, and when they were cancelled.
    How long the answers were comes from the trace."""
    ended: dict[str, dict[int, Any]] = {}
    for event in lines(run):
        if event["event"] == "request.finished":
            ended.setdefault(event["request_id"], {})[event["choice"]] = event
    asked: dict[str, Enqueue] = {}
    cancelled: dict[str, int] = {}
    for frame in frames(record_path(run, Role.SCHEDULER)):
        if isinstance(frame, Applied):
            body = frame.body()
            if isinstance(body, Enqueue) and not body.attempt and body.request_id in ended:
                asked[body.request_id] = body
            elif isinstance(body, Cancel):
                cancelled.setdefault(body.request_id, frame.now_ns)
    return [_again(one, ended[name], cancelled.get(name)) for name, one in asked.items()]


def _again(asked: Enqueue, ended: dict[int, Any], cancelled_ns: int | None) -> Session:
    now = asked.received_ns
    outputs = [max(1, int(ended[choice]["output_tokens"])) for choice in sorted(ended)]
    if cancelled_ns is not None:  # it would have gone on
        outputs = [output if asked.max_tokens is None else asked.max_tokens for output in outputs]
    turn = Turn(
        np.array(asked.ids),
        outputs[0],
        name=asked.request_id,
        others=tuple(outputs[1:]),
        limit=asked.max_tokens,
        cancel_s=None if cancelled_ns is None else (cancelled_ns - now) / 1e9,
    )
    deadline = None if asked.deadline_ns is None else (asked.deadline_ns - now) / 1e9
    return Session(now / 1e9, (turn,), asked.tenant, asked.priority, deadline)


def _traced(run: Path) -> list[Session]:
    """From the trace alone: lengths, arrivals and tenants; no prompt shares anything, which the trace does not tell."""
    received: dict[str, dict[str, Any]] = {}
    finished: dict[str, dict[str, Any]] = {}
    for event in lines(run):
        if event["event"] == "request.received" and not event["attempt"]:
            received[event["request_id"]] = event
        elif event["event"] == "request.finished" and event["choice"] == 0:
            finished[event["request_id"]] = event
    sessions = []
    for number, (name, event) in enumerate(received.items()):
        if (end := finished.get(name)) is not None and end["output_tokens"] > 0:
            new = (Segment(_UNSHARED + number, int(end["prompt_tokens"])),)
            turn = Turn(new, int(end["output_tokens"]), name=name)
            sessions.append(Session(event["received_ns"] / 1e9, (turn,), event["tenant"]))
    return sessions
