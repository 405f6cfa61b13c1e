"""Turns `--set` and `--against` into the configurations to compare.

`--set` values hold for all variants, and alone make the first; each `--against` makes one more: the same values, with
its own on top of them, separated by commas. A bare name is a batching policy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.core.config.load import load
from octavo.plugins.sim.simulate import Variant

_NEXT = re.compile(r",(?=[a-z_.]+=|[a-z-]+(?:,|$))")
"""A comma before another setting, not one within a value."""
ALWAYS = ("model.path=ghost", "server.enabled=false")
_BATCHING = "policies.batching"


def variants(
    file: Path | None, environ: Mapping[str, str], sets: Sequence[str], against: Sequence[str]
) -> list[Variant]:
    """Raises `ConfigError`."""
    first = [_full(part) for part in sets]
    config = load(file, environ, [*ALWAYS, *first]).config
    policies = [setting for setting in first if setting.startswith("policies.")]
    made = [Variant(_name(policies) or config.policies.batching, config)]
    for other in against:
        own = [_full(part) for part in _NEXT.split(other)]
        made.append(Variant(_name(own), load(file, environ, [*ALWAYS, *first, *own]).config))
    return _distinct(made)


def _full(setting: str) -> str:
    return setting if "=" in setting else f"{_BATCHING}={setting}"


def _name(settings: Sequence[str]) -> str:
    """Short: values of policies alone, with their key where it says more."""
    words = []
    for setting in settings:
        key, _, value = setting.partition("=")
        policy = key.startswith("policies.") and key.count(".") == 1
        words.append(value if policy else f"{key.rpartition('.')[2]}={value}")
    return " ".join(words)


def _distinct(made: list[Variant]) -> list[Variant]:
    names: dict[str, int] = {}
    out = []
    for name, config in made:
        names[name] = names.get(name, 0) + 1
        out.append(Variant(name if names[name] == 1 else f"{name} ({names[name]})", config))
    return out
