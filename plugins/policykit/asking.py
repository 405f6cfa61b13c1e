"""Asks a policy one thing and looks at everything but the answer: whether it comes back, raises, or changes a view."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from octavo.core.policy.answers import InvalidAnswer
from octavo.plugins.policykit.fault import PolicyFault

HANG_S = 5.0

Ask = Callable[[], Any]
Check = Callable[[Any], Any]


def ask(ask: Ask, check: Check, views: tuple[Any, ...], where: str) -> Any:
    """The checked answer. Raises `PolicyFault`."""
    before = [column.copy() for column in columns(views)]
    given = _within_time(ask, where)
    if isinstance(given, Exception):
        if "read-only" in str(given) or "cannot assign to field" in str(given):
            raise PolicyFault(f"it tries to change what it is shown: {given}", where, COPY) from given
        raise PolicyFault(
            f"it raises {type(given).__name__}: {given}",
            where,
            "make it answer here too; an answer that admits, gives or drafts nothing is always allowed",
        ) from given
    for column, was in zip(columns(views), before, strict=True):
        if not np.array_equal(column, was) or column.flags.writeable:
            raise PolicyFault("it changed a column that it was shown", where, COPY)
    try:
        return check(given)
    except InvalidAnswer as error:
        raise PolicyFault(
            f"its answer is not valid: {error}", where, "see the intent's docstring in octavo.policies.contract"
        ) from error


COPY = "work on a copy (`column.copy()`, or an expression that makes a new array)"


def columns(views: tuple[Any, ...]) -> list[np.ndarray[Any, Any]]:
    """All arrays in the views, in order."""
    found = []
    for view in views:
        if isinstance(view, np.ndarray):
            found.append(view)
        elif is_dataclass(view):
            found += [value for f in fields(view) if isinstance(value := getattr(view, f.name), np.ndarray)]
    return found


def _within_time(ask: Ask, where: str) -> Any:
    """What it answers or raises; a thread of its own, so that a hang can be told."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(ask())
        except Exception as error:  # noqa: BLE001 - a policy is a stranger's code: whatever it raises is its answer
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    if not box:
        raise PolicyFault(
            f"it has not answered after {HANG_S:g} s",
            where,
            "do not wait, sleep or do input and output in a policy: the whole engine waits for it",
        )
    return box[0]


def fastest_us(ask: Ask, times: int = 15) -> float:
    """The shortest of several calls, in µs of this thread's own time, so that a busy machine does not count."""
    best = float("inf")
    for _ in range(times):
        before = time.thread_time_ns()
        ask()
        best = min(best, (time.thread_time_ns() - before) / 1000)
    return best
