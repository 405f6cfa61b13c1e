"""What a valid answer of a policy is. Each check gives the answer in the kernel's own types or says what is wrong
with it, in words for its author."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.policies.contract import Floats, Ints, Leaves, Running, Selection, Step, Waiting


class InvalidAnswer(ValueError):
    """A policy's answer breaks the contract; the message says how."""


def selection(answer: Any, waiting: Waiting, running: Running) -> Selection:
    if not isinstance(answer, Selection):
        raise InvalidAnswer(f"select must return a Selection, not {type(answer).__name__}")
    admit = indices(answer.admit, len(waiting), "admit")
    if answer.when_blocked not in ("stop", "skip"):
        raise InvalidAnswer(f"when_blocked is {answer.when_blocked!r}, not 'stop' or 'skip'")
    decode = answer.decode
    if decode is not None:
        decode = np.asarray(decode)
        if decode.dtype != np.bool_ or decode.shape != (len(running),):
            raise InvalidAnswer(
                f"decode must be a mask of shape ({len(running)},), not {decode.dtype} of shape {decode.shape}"
            )
    preempt = None if answer.preempt is None else indices(answer.preempt, len(running), "preempt")
    refuse = None
    if answer.refuse is not None:
        refuse = indices(answer.refuse, len(waiting), "refuse")
        if np.isin(refuse, admit).any():
            raise InvalidAnswer(f"{np.intersect1d(refuse, admit).tolist()} are both in admit and in refuse")
    wake_ns = answer.wake_ns
    if wake_ns is not None and (isinstance(wake_ns, bool) or not isinstance(wake_ns, int | np.integer)):
        raise InvalidAnswer(f"wake_ns must be a time in ns (int) or None, not {wake_ns!r}")
    return Selection(admit, answer.when_blocked, decode, preempt, refuse, None if wake_ns is None else int(wake_ns))


def chunks(answer: Any, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
    tokens = integers(answer, len(remaining), "tokens")
    wrong = np.flatnonzero((tokens < 0) | (tokens > remaining))
    if len(wrong):
        i = int(wrong[0])
        raise InvalidAnswer(
            f"tokens must lie between 0 and what remains: prefill {i} has {remaining[i]} left, not {tokens[i]}"
        )
    room = max(0, step.chunk_budget - decode_tokens)
    if int(tokens.sum(dtype=np.int64)) > room:
        raise InvalidAnswer(
            f"tokens sum to {int(tokens.sum(dtype=np.int64))}, but of the budget of {step.chunk_budget} the decodes "
            f"leave {room}"
        )
    return tokens


def victims(answer: Any, candidates: Running) -> Ints:
    return indices(answer, len(candidates), "victims")


def drafts(answer: Any, running: Running) -> Ints:
    lengths = integers(answer, len(running), "draft lengths")
    if (lengths < 0).any():
        raise InvalidAnswer(f"draft lengths must be at least 0, not {int(lengths.min())}")
    return lengths


def scores(answer: Any, leaves: Leaves) -> Floats:
    array = np.asarray(answer)
    if array.shape != (len(leaves),) or array.dtype.kind not in "iuf":
        raise InvalidAnswer(f"scores must be {len(leaves)} numbers, not {array.dtype} of shape {array.shape}")
    array = array.astype(np.float64, copy=False)
    if not np.isfinite(array).all():
        i = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InvalidAnswer(f"scores must be finite; that of leaf {i} is {array[i]}")
    return array


def integers(values: Any, count: int, what: str) -> Ints:
    array = np.asarray(values)
    if array.shape != (count,) or (count and array.dtype.kind not in "iu"):
        raise InvalidAnswer(f"{what} must be {count} integers, not {array.dtype} of shape {array.shape}")
    if array.dtype != np.int32:
        if count and (array.min() < -(2**31) or array.max() >= 2**31):
            raise InvalidAnswer(f"{what} must fit 32 bits: they reach from {array.min()} to {array.max()}")
        array = array.astype(np.int32)
    return array


def indices(values: Any, below: int, what: str) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidAnswer(f"{what} must be a column of indices, not of shape {array.shape}")
    array = integers(array, len(array), what)
    if not len(array):
        return array
    wrong = array[(array < 0) | (array >= below)]
    if len(wrong):
        raise InvalidAnswer(f"{what} must be indices from 0 to {below - 1}; {int(wrong[0])} is not")
    seen = np.bincount(array, minlength=below)
    if seen.max() > 1:
        raise InvalidAnswer(f"{what} must be distinct; {int(seen.argmax())} comes {int(seen.max())} times")
    return array
