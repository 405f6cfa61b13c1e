"""Which executor serves, where the configuration leaves it open, and what is lost if it is not the best one.

The choice is made at the first start of a run and kept for all later ones: another executor has other arithmetic, and
what a request gets must not change when a process is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from octavo.core.config.schema import AUTO, Config
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.core.plugins import PluginError, resolve
from octavo.core.trace.log import log
from octavo.executors.base import Executor

GROUP = "octavo.executor"
BEST = "native"
ORDER = (BEST, "cpu", "transformers")
"""Who is asked, until one serves the model: the fastest first, then who serves more models."""
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
    """The first of `ORDER` that serves the model. Raises `ModelError` with what each says against it."""
    refusals: dict[str, str] = {}
    for kind in ORDER if locate(config.model.path).kind == "folder" else ORDER[:-1]:  # the library reads folders
        try:
            executor_class = resolve(GROUP, kind)
        except PluginError as error:
            refusals[kind] = str(error)
            continue
        try:
            executor = executor_class.load(config)
        except (ModelError, OSError) as error:  # not what is wrong with a part that others would have, too
            refusals[kind] = str(error)
            continue
        if not refusals:
            return Chosen(executor, kind)
        note = f"the executor is {kind!r} instead of {BEST!r}, which is several times as fast: {refusals[BEST]}"
        return Chosen(executor, kind, note)
    if len(set(refusals.values())) == 1:  # it is the model, whoever serves it
        raise ModelError(refusals[BEST])
    raise ModelError("; ".join(f"{kind}: {why}" for kind, why in refusals.items()))


def _load(kind: str, config: Config) -> Executor:
    executor: Executor = resolve(GROUP, kind).load(config)
    return executor
