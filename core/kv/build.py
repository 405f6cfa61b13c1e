"""Makes the KV-manager's core from the configuration and the executor's facts."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.config.schema import Config
from octavo.core.kv.core import KvCore
from octavo.core.messages import Facts
from octavo.core.policy import PolicyHost, load_policies
from octavo.core.policy.host import no_clock
from octavo.core.policy.watch import Watch


def build(
    config: Config, facts: Facts, generation: int, clock: Callable[[], int] = no_clock, watch: Watch | None = None
) -> KvCore:
    """A core with an empty pool, for this generation of the KV state. `clock` times policies, in ns; `watch` looks on
    while they are asked."""
    return KvCore(
        total_blocks=facts.total_blocks,
        block_size=facts.block_size,
        slots=config.scheduler.max_sequences,
        eviction=PolicyHost(
            load_policies(config.policies),
            clock=clock,
            budget_ns=config.policies.call_budget_us * 1000,
            watch=watch,
            weights=config.policies.weights,
        ),
        generation=generation,
        caching=config.kv.prefix_cache,
        host_blocks=facts.host_blocks,
        prompts_apart=facts.prompts_apart,
    )
