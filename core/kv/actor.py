"""The KV-manager's process: its core in the common shell, and plans that pass through untouched.

The plan's own frame travels on beside the bind that the core made of it; it is never encoded again.
"""

from __future__ import annotations

from pathlib import Path

from octavo.core.actor import CoreActor
from octavo.core.config.schema import Config
from octavo.core.control import AskCache, CacheState, TenantBlocks, Topology
from octavo.core.kv.build import build
from octavo.core.kv.core import KvCore
from octavo.core.kv.host import HostTier
from octavo.core.machine import Outbound
from octavo.core.messages import Flush, Role, StepBind, col, encode
from octavo.core.policy.tap import ProcessWatch
from octavo.core.station import Arrival
from octavo.core.trace.catalogue import KvFlushed


class KvActor(CoreActor[KvCore]):
    def can_start(self, topology: Topology) -> bool:
        """The pool describes the bytes of one executor, so it is made when that one is there."""
        executor = topology.member(Role.EXECUTOR)
        return executor is not None and executor.up

    def beside(self, outbound: Outbound, arrival: Arrival | None) -> list[bytes]:
        body = encode(outbound.message)
        if isinstance(outbound.message, StepBind) and arrival is not None:
            return [arrival.frames[0], body]
        return [body]

    def ask_cache(self, asked: AskCache) -> None:
        core = self._core
        if core is None:
            self.link.send(CacheState(ref=asked.ref, asker=asked.asker, error="the KV-manager has no pool yet"))
            return
        freed = in_use = from_host = 0
        if asked.flush:
            for event in self._apply(core, Flush(asked.tenant, col(asked.prefix))).events:
                if isinstance(event, KvFlushed):
                    freed, in_use, from_host = event.freed, event.in_use, event.from_host
        pool = core.pool
        state = CacheState(
            ref=asked.ref,
            asker=asked.asker,
            total=pool.total,
            free=pool.free,
            used=pool.total - pool.available,
            tenants=[TenantBlocks(*row) for row in core.by_tenant()],
            freed=freed,
            in_use=in_use,
            from_host=from_host,
        )
        self.link.send(state)


def stats(core: KvCore) -> dict[str, int]:
    pool = core.pool
    return {
        "total_blocks": pool.total,
        "block_size": core.block_size,
        "free_blocks": pool.free,
        "cached_blocks": pool.cached,
        "used_blocks": pool.total - pool.available,
        "evicted_blocks": pool.evicted,
        **({} if pool.host is None else _host_stats(pool.host)),
        **{f"namespace_{name}_blocks": blocks for name, blocks in core.cached_by_namespace.items()},
        **core.policy_stats,
    }


def _host_stats(host: HostTier) -> dict[str, int]:
    return {
        "host_places": host.total,
        "host_blocks": len(host),
        "swapped_out_blocks": host.swapped_out,
        "swapped_in_blocks": host.swapped_in,
    }


def run(config: Config, run_dir: Path, generation: int) -> None:
    watch = ProcessWatch(run_dir, Role.KV)
    KvActor(
        config,
        run_dir,
        Role.KV,
        generation,
        make=lambda facts, state, clock: build(config, facts, state, clock, watch),
        stats=stats,
        watch=watch,
    ).run()
