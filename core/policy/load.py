"""Finds policies by name and makes them with their options.

One rule: a class with an attribute `Options` is made as `Class(options)`, any other as `Class()`. All that is wrong
with the options is found at once, by key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import replace

from octavo.core.config.schema import AUTO, PolicyConfig
from octavo.core.plugins import PluginError, resolve
from octavo.policies.contract import (
    CONTRACT_VERSION,
    Batching,
    Chunking,
    Eviction,
    PolicyOptions,
    Preemption,
    Speculation,
)

METHODS = {
    "batching": "select",
    "chunking": "split",
    "preemption": "victims",
    "eviction": "rank",
    "speculation": "draft_lengths",
}
"""The groups of policies, and what each is asked by."""


_NO_WEIGHTS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy of each group."""

    batching: Batching
    chunking: Chunking
    preemption: Preemption
    eviction: Eviction
    speculation: Speculation
    names: dict[str, str]
    """Group → name, for reports."""


def load_policies(config: PolicyConfig, *, guesses: bool = False) -> Policies:
    """Make the configured policies; `PluginError` says which one cannot be had, and why. `guesses`: the executor has a
    drafter."""
    config = settled(config, guesses=guesses)
    names = {group: getattr(config, group) for group in METHODS}
    made = {
        group: load_policy(group, name, config.options.get(group, {}), config.weights) for group, name in names.items()
    }
    return Policies(**made, names=names)


def settled(config: PolicyConfig, *, guesses: bool) -> PolicyConfig:
    """With a name for each group. What `adaptive` was to get is nothing to `off`."""
    if config.speculation != AUTO:
        return config
    if guesses:
        return replace(config, speculation="adaptive")
    return replace(config, speculation="off", options={**config.options, "speculation": {}})


def load_policy(group: str, name: str, options: Mapping[str, Any], weights: Mapping[str, float] = _NO_WEIGHTS) -> Any:
    """A policy of the group; `PluginError` if it is not installed, does not fit, or does not take the options. If it
    has an option `weights` that is not among them, the tenants' common ones are taken."""
    kind = find_policy(group, name)
    if weights and "weights" in getattr(getattr(kind, "Options", None), "__struct_fields__", ()):
        options = {"weights": dict(weights), **options}
    if problems := list(option_problems(kind, options)):
        raise PluginError(f"{group} policy {name!r}: " + "; ".join(f"{key}: {why}" for key, why in problems))
    return make_policy(kind, group, name, options)


def make_policy(kind: Any, group: str, name: str, options: Mapping[str, Any]) -> Any:
    """An object of the class, made with options that it has no problem with."""
    taken = getattr(kind, "Options", None)
    try:
        return kind() if taken is None else kind(msgspec.convert(dict(options), taken))
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{group} policy {name!r} cannot be made: {why}") from error


def find_policy(group: str, name: str) -> Any:
    """The class of that name, if it can be a policy of the group at all."""
    try:
        kind = resolve(f"octavo.{group}", name)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"{group} policy {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    method = METHODS[group]
    version = getattr(kind, "contract", CONTRACT_VERSION)
    if version != CONTRACT_VERSION:
        raise PluginError(
            f"{group} policy {name!r} was written for contract {version}, this Octavo has {CONTRACT_VERSION}: "
            f"install a release of it that says `contract = {CONTRACT_VERSION}`"
        )
    if not callable(getattr(kind, method, None)):
        raise PluginError(f"{group} policy {name!r} has no method {method}: see octavo.policies.contract")
    taken = getattr(kind, "Options", None)
    if taken is not None and not (isinstance(taken, type) and issubclass(taken, PolicyOptions)):
        raise PluginError(f"{group} policy {name!r}: its Options must be a subclass of PolicyOptions, not {taken!r}")
    return kind


def option_problems(kind: Any, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) for each option that the class does not take; key "" for the whole."""
    taken: type[PolicyOptions] | None = getattr(kind, "Options", None)
    known = {} if taken is None else get_type_hints(taken, include_extras=True)
    sound = True
    for key, value in options.items():
        if key not in known:
            sound = False
            close = difflib.get_close_matches(key, known, n=1)
            has = f"it has {', '.join(known)}" if known else "this policy has none"
            yield key, f"no such option; did you mean {close[0]}?" if close else f"no such option; {has}"
            continue
        try:
            msgspec.convert(value, known[key])
        except msgspec.ValidationError as error:
            sound = False
            yield key, f"{error}; it is {value!r}"
    if sound and taken is not None:
        try:
            msgspec.convert(dict(options), taken)
        except msgspec.ValidationError as error:  # a field without default, or what `__post_init__` says
            yield "", str(error)
