"""Parts that are chosen by name: entry points in the `octavo.*` groups.

This is the only way from the kernel to an executor, a gateway or a built-in policy; nothing imports
one by name. Nothing here knows what a part does.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any


class PluginError(Exception):
    """A named part is not installed, is installed twice, or cannot be loaded."""


def installed(group: str) -> list[str]:
    """Names in an entry-point group such as `octavo.batching`, sorted."""
    return sorted(metadata.entry_points(group=group).names)


def unknown(group: str, name: str) -> str:
    """The sentence for a name that is not installed."""
    names = ", ".join(installed(group)) or "none"
    return f"no {group} plugin is called {name!r}; installed: {names}"


def resolve(group: str, name: str) -> Any:
    """Load the part called `name` in `group`; `PluginError` says what is wrong and what is installed."""
    points = metadata.entry_points(group=group, name=name)
    targets = {point.value: point for point in points}
    if not targets:
        raise PluginError(unknown(group, name))
    if len(targets) > 1:
        owners = ", ".join(sorted(f"{p.value} ({p.dist.name if p.dist else 'unknown package'})" for p in points))
        raise PluginError(f"{len(targets)} {group} plugins are called {name!r}: {owners}; uninstall all but one")
    (point,) = targets.values()
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{group} plugin {name!r} ({point.value}) cannot be loaded: {error}") from error
