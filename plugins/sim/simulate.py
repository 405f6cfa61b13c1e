"""Runs one variant: a configuration against a workload, to its summary and its requests' times.

The same inputs give the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from octavo.core.config.schema import Config
from octavo.core.kv.build import build as build_kv
from octavo.core.machine import Core
from octavo.core.messages import Facts, Role
from octavo.core.plugins import resolve
from octavo.core.scheduler.build import build as build_scheduler
from octavo.core.trace.catalogue import Event
from octavo.plugins.sim.clients import Load
from octavo.plugins.sim.cost import CostModel
from octavo.plugins.sim.lean import LeanExecutor
from octavo.plugins.sim.machine import Machine, Runs
from octavo.plugins.sim.metrics import Slo
from octavo.plugins.sim.summary import Listener, Summary, Times
from octavo.plugins.sim.workload import Workload
from octavo.plugins.sim.write import TraceWriter


class Variant(NamedTuple):
    name: str
    config: Config


def cores_of(config: Config, facts: Facts) -> dict[Role, Core]:
    """What decides in a daemon of this configuration, before it has heard of anybody."""
    return {Role.SCHEDULER: build_scheduler(config, facts, 1), Role.KV: build_kv(config, facts, 1)}


class Simulated(NamedTuple):
    summary: Summary
    times: Times


def simulate(
    variant: Variant,
    workload: Workload,
    cost: CostModel,
    slo: Slo,
    *,
    verify: bool = False,
    out: Path | None = None,
    progress: Callable[[int], None] = lambda finished: None,
) -> Simulated:
    """`verify` runs the ghost, which checks every read of the KV; `out` gets the events as a daemon would write them.
    `progress` hears how many requests are finished."""
    config = variant.config
    ghost = resolve("octavo.executor", "ghost").load(config)
    executor: Runs = ghost if verify else LeanExecutor(config.scheduler.max_sequences)
    cores = cores_of(config, ghost.facts)
    load = Load(workload)
    listener = Listener(load.measured)
    if out is None:
        Machine(cores, cost, executor, load, listener).run(lambda: progress(load.finished))
    else:
        with TraceWriter(out, config) as writer:

            def both(now_ns: int, role: Role, event: Event) -> None:
                listener(now_ns, role, event)
                writer.write(now_ns, role, event)

            Machine(cores, cost, executor, load, both).run(lambda: progress(load.finished))
    progress(load.finished)
    return Simulated(listener.summary(variant.name, load.finished, slo), listener.times())
