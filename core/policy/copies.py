"""Copies of policies' calls, to be asked again elsewhere: what was asked and what the kernel went by, as one frame.

Columns are carried as raw bytes; the contract's own types say what they hold.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np

from octavo.policies.contract import Floats, Ints, Leaves, Observed, Running, Selection, Step, Waiting


class Call(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`number` counts the calls since the copies began: a gap is what was dropped. `policy` is who answers and took
    `spent_ns` for it. The arguments follow, as the policy's method has them, and the `answer` that the kernel goes
    by."""

    number: int
    policy: str
    spent_ns: int


class Selected(Call, frozen=True, kw_only=True):
    step: Step
    waiting: Waiting
    running: Running
    answer: Selection


class Split(Call, frozen=True, kw_only=True):
    step: Step
    remaining: Ints
    decode_tokens: int
    answer: Ints


class Victims(Call, frozen=True, kw_only=True):
    step: Step
    need: int
    candidates: Running
    answer: Ints


class Ranked(Call, frozen=True, kw_only=True):
    need: int
    leaves: Leaves
    answer: Floats


class Drafted(Call, frozen=True, kw_only=True):
    step: Step
    running: Running
    answer: Ints


class Told(msgspec.Struct, tag=True, frozen=True):
    """What policies were told of what happened."""

    observed: Observed


CALLS: dict[str, type[Call]] = {
    "batching": Selected,
    "chunking": Split,
    "preemption": Victims,
    "eviction": Ranked,
    "speculation": Drafted,
}
Copy: TypeAlias = Selected | Split | Victims | Ranked | Drafted | Told


def call(group: str, number: int, policy: str, spent_ns: int, arguments: tuple[Any, ...], answer: Any) -> bytes:
    """The frame of a call."""
    made = CALLS[group]
    names = made.__struct_fields__[len(Call.__struct_fields__) :]
    parts = dict(zip(names, (*arguments, answer), strict=True))
    return _encoder.encode(made(number=number, policy=policy, spent_ns=spent_ns, **parts))


def told(observed: Observed) -> bytes:
    return _encoder.encode(Told(observed))


def decode(frame: bytes) -> Copy:
    """`msgspec.DecodeError` or `ValidationError` if it is none. Columns are read-only."""
    return _decoder.decode(frame)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _column(kind: Any, value: Any) -> Any:
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(value, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[Copy] = msgspec.msgpack.Decoder(Copy, dec_hook=_column)
