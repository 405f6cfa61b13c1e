"""Which executor serves, where the configuration leaves it open, and what is lost if it is not the best one.

The choice is made at the first start of a run and kept for all later ones: another executor has other arithmetic, and
what a request gets must not change when a process is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from octavo.core.config.schema import Config
from octavo.core.models.errors import ModelError
from octavo.core.plugins import PluginError, resolve
from octavo.core.trace.log import log
from octavo.executors.base import Executor

AUTO = "auto"
BEST, OTHER = "native", "cpu"
MEMO = "executor"
"""The file of a run that names what was chosen."""


class Chosen(NamedTuple):
    """`note` says what is lost and how to get it; empty if nothing is."""

    executor: Executor
    kind: str
    note: str = ""


def load_executor(config: Config, run_dir: Path, *, first: bool) -> Chosen:
    """Raises what the executor's `load` raises, `PluginError` if it is not installed."""
    kind = config.executor.kind
    if kind == AUTO and config.model.path == "ghost":
        kind = "ghost"
    if kind != AUTO:
        return Chosen(_load(kind, config), kind)
    memo = run_dir / MEMO
    if not first:
        kind, _, note = memo.read_text(encoding="utf-8").partition("\n")
        return Chosen(_load(kind, config), kind, note)
    chosen = _best(config)
    memo.write_text(f"{chosen.kind}\n{chosen.note}", encoding="utf-8")
    if chosen.note:
        log().warning(chosen.note)
    return chosen


def _best(config: Config) -> Chosen:
    try:
        return Chosen(_load(BEST, config), BEST)
    except (ModelError, OSError) as error:
        why = error
    try:
        executor = _load(OTHER, config)
    except (ModelError, OSError, PluginError) as error:
        if str(error) == str(why):  # it is the model, whoever serves it
            raise
        raise ModelError(f"{why}; the executor {OTHER!r} does not serve it either: {error}") from error
    note = f"the executor is {OTHER!r} instead of {BEST!r}, 3 to 15 times slower: {why}"
    return Chosen(executor, OTHER, note)


def _load(kind: str, config: Config) -> Executor:
    executor: Executor = resolve("octavo.executor", kind).load(config)
    return executor
