"""The page at `/metrics`: what the gateway counts, and what the actors last said of themselves.

An actor's numbers come with its heartbeats through the supervisor. Those that count begin again with its process;
here they go on, so that a counter only grows while the gateway lives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.control import ActorStatus, Status
from octavo.core.rundir import read
from octavo.core.supervisor.status import ask
from octavo.plugins.metrics.dashboard import Dashboard
from octavo.plugins.metrics.families import CONTENT_TYPE, Counter, Cumulative, Family, Gauge, render
from octavo.plugins.metrics.meter import Meter, Numbers, Opens
from octavo.plugins.metrics.names import vllm

ACTORS = ("executor", "kv", "scheduler", "tokenizer", "gateway")
STATES = ("running", "waiting")
ASKING = ("kv", "scheduler")
"""Who asks policies."""
BLOCKS = ("free", "cached", "used")
DIRECTIONS = ("out", "in")
GUESSES = ("accepted", "wasted")
PLACES = ("1", "2", "3", "4", "5", "6", "7", "8")
"""In a draft."""
STEP_TOKENS = (1, 8, 32, 128, 512, 2048)
"""As the executor counts its steps."""
SERVICE = ("starting", "ready", "degraded", "draining")

Ask = Callable[[], Status | None]
E = TypeVar("E", bound=Opens)


class Service:
    """Gauges and counters of the actors, filled from a `Status`."""

    def __init__(self) -> None:
        self.state = Gauge("octavo_service_state", "1 for the state that the service is in.", "state", SERVICE)
        self.up = Gauge("octavo_actor_ready", "1 for an actor that is ready.", "actor", ACTORS)
        self.restarts = Counter("octavo_actor_restarts_total", "Restarts of an actor.", "actor", ACTORS)
        self.generation = Gauge("octavo_actor_generation", "Generation of an actor's state.", "actor", ACTORS)
        self.sequences = Gauge("octavo_sequences", "Sequences in the scheduler.", "state", STATES)
        self.blocks = Gauge(
            "octavo_kv_blocks",
            "Blocks of the KV pool; cached ones are not in use, and given up when others need them.",
            "state",
            BLOCKS,
        )
        self.total = Gauge("octavo_kv_blocks_pool", "Blocks that there are.")
        self.block_size = Gauge("octavo_kv_block_size", "Tokens in a block.")
        self.step_tokens = Cumulative("octavo_step_tokens", "Tokens that a step computed.", STEP_TOKENS)
        self.steps = Counter("octavo_steps_total", "Steps that the executor has run.")
        self.preemptions = Counter("octavo_preemptions_total", "Sequences that had to give up their slot.")
        self.drafted = Counter(
            "octavo_draft_tokens_total", "Guesses that were verified, by what became of them.", "outcome", GUESSES
        )
        self.judged = Counter(
            "octavo_draft_judged_total", "Drafts whose guess at this place was judged.", "place", PLACES
        )
        self.right = Counter("octavo_draft_accepted_total", "Of these, the ones that were right.", "place", PLACES)
        self.failed = Counter(
            "octavo_drafter_failures_total",
            "Exceptions of the drafter; after three it is not asked any more, until the executor is started anew.",
        )
        self.evicted = Counter("octavo_kv_evicted_blocks_total", "Cached blocks that were given up.")
        self.swapped = Counter(
            "octavo_kv_swapped_blocks_total",
            "Blocks that were copied between the pool and host memory.",
            "direction",
            DIRECTIONS,
        )
        self.off = Gauge(
            "octavo_policies_off", "Policies that are switched off: the kernel's own rule stands in.", "actor", ASKING
        )
        self._before: dict[tuple[str, str], tuple[int | None, int]] = {}
        """Process and value at which a number was last seen."""

    def families(self) -> list[Family]:
        return [one for one in vars(self).values() if isinstance(one, Family)]

    def take(self, status: Status) -> None:
        for state in SERVICE:
            self.state.set(float(status.state == state), state)
        for actor in status.actors:
            if actor.role in ACTORS:
                self.up.set(float(actor.state == "ready"), actor.role)
                self.generation.set(actor.generation, actor.role)
                self.restarts.add(self._growth(actor, "restarts", actor.restarts, None), actor.role)
                self._take_stats(actor)

    def _take_stats(self, actor: ActorStatus) -> None:
        stats = actor.stats
        if actor.role in ASKING:
            self.off.set(stats.get("policy_tripped", 0), actor.role)
        match actor.role:
            case "scheduler":
                for state in STATES:
                    self.sequences.set(stats.get(state, 0), state)
                self.preemptions.add(self._growth(actor, "preemptions", stats.get("preemptions", 0), actor.pid))
                drafted, accepted = (
                    self._growth(actor, name, stats.get(name, 0), actor.pid) for name in ("drafted", "accepted")
                )
                self.drafted.add(accepted, "accepted")
                self.drafted.add(drafted - accepted, "wasted")
                for place in PLACES:
                    for counter, name in ((self.judged, f"judged_{place}"), (self.right, f"accepted_{place}")):
                        counter.add(self._growth(actor, name, stats.get(name, 0), actor.pid), place)
            case "kv":
                total, free, used = (stats.get(f"{name}_blocks", 0) for name in ("total", "free", "used"))
                for state, count in zip(BLOCKS, (free, total - free - used, used), strict=True):
                    self.blocks.set(count, state)
                self.total.set(total)
                self.block_size.set(stats.get("block_size", 0))
                self.evicted.add(self._growth(actor, "evicted", stats.get("evicted_blocks", 0), actor.pid))
                for way in DIRECTIONS:
                    swapped = stats.get(f"swapped_{way}_blocks", 0)
                    self.swapped.add(self._growth(actor, f"swapped_{way}", swapped, actor.pid), way)
            case "executor":
                self.steps.add(self._growth(actor, "steps", stats.get("steps", 0), actor.pid))
                names = [*(f"steps_of_{most}" for most in STEP_TOKENS), "steps_of_more"]
                grown = [self._growth(actor, name, stats.get(name, 0), actor.pid) for name in names]
                failures = self._growth(actor, "drafter_failures", stats.get("drafter_failures", 0), actor.pid)
                self.failed.add(failures)
                self.step_tokens.add(grown, self._growth(actor, "computed", stats.get("computed", 0), actor.pid))

    def _growth(self, actor: ActorStatus, what: str, value: int, pid: int | None) -> int:
        """How much more than last time; all of it, where counting began anew."""
        key = (actor.role, what)
        known_pid, known = self._before.get(key, (pid, 0))
        self._before[key] = (pid, value)
        return value - known if known_pid == pid and value >= known else value


class Metrics:
    """What the gateway needs: a meter to put before its engine, and the routes of the pages."""

    def __init__(self, ask_status: Ask, dashboard: Dashboard) -> None:
        self.numbers = Numbers()
        self._service = Service()
        self._ask = ask_status
        self._dashboard = dashboard
        self._turn = anyio.Lock()

    @classmethod
    def of_run(cls, run_dir: Path) -> Metrics:
        return cls(partial(_ask, run_dir), Dashboard(run_dir))

    def meter(self, engine: E) -> E:
        """The engine, counted; to its users it is of the same kind."""
        return cast(E, Meter(engine, self.numbers))

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.page, methods=["GET"]), *self._dashboard.routes()]

    async def page(self, request: Request) -> Response:
        """`?names=vllm` gives vLLM's names, for dashboards and routers made for it."""
        async with self._turn:  # each answer is counted once
            status = await anyio.to_thread.run_sync(self._ask)
            if status is not None:
                self._service.take(status)
        families = [*self.numbers.families(), *self._service.families()]
        if request.query_params.get("names") == "vllm":
            families = vllm(self.numbers, self._service)
        return Response(render(families, {}), headers={"content-type": CONTENT_TYPE})


def _ask(run_dir: Path) -> Status | None:
    info = read(run_dir)
    return None if info is None else ask(info)
