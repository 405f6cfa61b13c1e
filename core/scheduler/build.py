"""Makes the scheduler's core from the configuration and the executor's facts."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.config.schema import Config
from octavo.core.messages import Facts
from octavo.core.policy import PolicyHost, load_policies
from octavo.core.policy.host import no_clock
from octavo.core.policy.watch import Watch
from octavo.core.scheduler.core import SchedulerCore


def build(
    config: Config, facts: Facts, generation: int, clock: Callable[[], int] = no_clock, watch: Watch | None = None
) -> SchedulerCore:
    """An empty scheduler of this generation. `clock` times policies, in ns; `watch` looks on
    while they are asked."""
    tell_every_ms = facts.tell_every_ms if config.scheduler.tell_every_ms is None else config.scheduler.tell_every_ms
    return SchedulerCore(
        host=PolicyHost(
            load_policies(config.policies, guesses=bool(facts.drafter)),
            clock=clock,
            budget_ns=config.policies.call_budget_us * 1000,
            watch=watch,
            weights=config.policies.weights,
        ),
        generation=generation,
        slots=config.scheduler.max_sequences,
        block_size=facts.block_size,
        total_blocks=facts.total_blocks,
        swaps=facts.host_blocks > 0,
        tell_every_ns=int(tell_every_ms * 1e6) if "rounds" in facts.serves else 0,
        context=min(facts.context, config.model.context or facts.context),
        chunk_budget=config.scheduler.chunk_budget,
        depth=config.scheduler.depth,
        waiting_window=config.scheduler.waiting_window,
        max_waiting=config.scheduler.max_waiting,
    )
