"""A call of a policy as plain data, so that the author can repeat it: `dump.repeat(call, policy)`.

The event `policy.tripped` carries one.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from octavo.core.policy.load import METHODS
from octavo.policies.contract import Leaves, Running, Step, Waiting

_VIEWS: dict[str, Any] = {view.__name__: view for view in (Step, Waiting, Running, Leaves)}


def call(group: str, arguments: tuple[Any, ...], answer: Any) -> dict[str, Any]:
    """What was asked, and what was answered (in words: it may be anything)."""
    return {"group": group, "arguments": [_plain(value) for value in arguments], "answer": repr(answer)[:2000]}


def repeat(dumped: dict[str, Any], policy: Any) -> Any:
    """Ask the policy the same again."""
    return getattr(policy, METHODS[dumped["group"]])(*arguments(dumped))


def arguments(dumped: dict[str, Any]) -> list[Any]:
    """The views of the call, frozen as they were."""
    return [_live(value) for value in dumped["arguments"]]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if is_dataclass(value):
        return {"view": type(value).__name__} | {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _live(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        column = np.asarray(value["values"], dtype=value["dtype"])
        column.flags.writeable = False
        return column
    if isinstance(value, dict):
        view = _VIEWS[value["view"]]
        return view(**{name: _live(part) for name, part in value.items() if name != "view"})
    return tuple(value) if isinstance(value, list) else value
