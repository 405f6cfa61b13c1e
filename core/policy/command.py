"""`octavo policy`: which policies there are, what one takes, and another one for a daemon that runs."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from octavo.core.config.load import load
from octavo.core.config.schema import AUTO, PolicyConfig
from octavo.core.control import SetPolicy, SetShadow
from octavo.core.plugins import PluginError, installed
from octavo.core.policy import findings
from octavo.core.policy.load import METHODS, find_policy, settled
from octavo.core.rundir import RunInfo, find_run, none_runs
from octavo.core.supervisor.status import tell


def list_all() -> int:
    """A line for each installed policy; the default of its group has a star."""
    default = settled(PolicyConfig(), guesses=True)
    rows = [
        (group, name + (" *" if name == getattr(default, group) else ""), _summary(find_policy(group, name)))
        for group in METHODS
        for name in installed(f"octavo.{group}")
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for group, name, summary in rows:
        print(f"{group:{widths[0]}}  {name:{widths[1]}}  {summary}")
    return 0


def show(group: str, name: str) -> int:
    """What it does, and its options with their defaults."""
    if group not in METHODS:
        raise PluginError(f"there is no group of policies {group!r}; there are {', '.join(METHODS)}")
    kind = find_policy(group, name)
    module = sys.modules[kind.__module__]
    print(f"{group} = {name}  ({kind.__module__})", module.__doc__ or "", inspect.getdoc(kind) or "", sep="\n\n")
    if (options := getattr(kind, "Options", None)) is not None:
        print("\noptions:")
        for field in msgspec.structs.fields(options):
            kind_of = get_type_hints(options)[field.name]
            print(f"  policies.options.{group}.{field.name} = {_default(field)}  ({_type_name(kind_of)})")
    return 0


def change(setting: str, options: Sequence[str], run: Path | None) -> int:
    """Tell the daemon; what is wrong with the policy is told here, before anything changes."""
    group, name, chosen = _chosen(setting, options)
    _tell(_daemon(run), SetPolicy(group=group, name=name, options=chosen))
    print(f"{group} is {name} from the next step on, until the daemon ends")
    return 0


def shadow(setting: str | None, options: Sequence[str], run: Path | None) -> int:
    """Start one beside the live policy of its group; "off" ends all; without a setting, tell what they have found."""
    info = _daemon(run)
    if setting is None:
        found = findings.read_fresh(info.path)
        print(
            "\n\n".join(map(findings.text, found)) or "no policy has run in the shadow; octavo policy shadow GROUP=NAME"
        )
    elif setting == "off":
        for group in METHODS:
            _tell(info, SetShadow(group=group))
        print("no policy runs in the shadow any more; what was found stays until the daemon ends")
    else:
        group, name, chosen = _chosen(setting, options)
        asked = time.time()
        findings.forget(info.path, group)
        _tell(info, SetShadow(group=group, name=name, options=chosen))
        if not findings.begun(info.path, group, asked):
            raise PluginError(f"the shadow's process has not begun within {findings.BEGIN_S:g} s: see the daemon's log")
        print(
            f"{name} answers beside the live {group} policy, without effect; `octavo policy shadow` tells what it finds"
        )
    return 0


def _chosen(setting: str, options: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """Group, name and options, if there is such a policy and it takes them."""
    group, equals, name = setting.partition("=")
    if not equals or group not in METHODS:
        raise PluginError(f"{setting!r} must look like GROUP=NAME; the groups are {', '.join(METHODS)}")
    if (group, name) == ("speculation", AUTO):
        raise PluginError(f"{setting} is for the start, where `{AUTO}` is decided; now say which: adaptive, or off")
    sets = [f"policies.{group}={name}", *(f"policies.options.{group}.{option}" for option in options)]
    return group, name, load(sets=sets).config.policies.options.get(group, {})


def _daemon(run: Path | None) -> RunInfo:
    info = find_run(run)
    if info is None:
        raise PluginError(none_runs(run))
    return info


def _tell(info: RunInfo, message: SetPolicy | SetShadow) -> None:
    if tell(info, message) is None:
        raise PluginError(f"the daemon (pid {info.pid}, {info.run_dir}) does not answer")


def _summary(kind: Any) -> str:
    doc = sys.modules[kind.__module__].__doc__ or inspect.getdoc(kind) or ""
    return doc.strip().split("\n")[0]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    factory = field.default_factory
    return "(required)" if factory is msgspec.NODEFAULT else factory()


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
