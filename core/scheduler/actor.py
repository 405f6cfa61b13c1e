"""The scheduler's process: its core in the common shell."""

from __future__ import annotations

from pathlib import Path

from octavo.core.actor import CoreActor
from octavo.core.config.schema import Config
from octavo.core.messages import Role
from octavo.core.policy.tap import ProcessWatch
from octavo.core.scheduler.build import build
from octavo.core.scheduler.core import SchedulerCore


def stats(core: SchedulerCore) -> dict[str, int]:
    return core.stats


def run(config: Config, run_dir: Path, generation: int) -> None:
    """Until the supervisor says Shutdown."""
    watch = ProcessWatch(run_dir, Role.SCHEDULER)
    CoreActor(
        config,
        run_dir,
        Role.SCHEDULER,
        generation,
        make=lambda facts, state, clock: build(config, facts, state, clock, watch),
        stats=stats,
        watch=watch,
    ).run()
