"""The figures of a running service as `octavo top` and the dashboard show them: one look, one `Figures`.

Counts come from what the actors last said (`Status`), latencies from what clients measured, as the trace has it. Rates
are of the last seconds, between looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from octavo.core.control import ActorStatus, Status
from octavo.core.memory import process_memory
from octavo.core.rundir import RunInfo, read_config
from octavo.core.trace.catalogue import (
    PolicySwapped,
    RequestFinished,
    RequestReceived,
    RequestTaken,
    RequestTokenized,
)
from octavo.core.trace.read import Line
from octavo.plugins.metrics.tail import Tail

WINDOW_S = 60.0
"""Latencies and the hit rate are of so long."""
RATES_S = 4.0
"""Rates are of so long: heartbeats come once a second."""
KEPT_LOOKS = 180
KINDS = (RequestTaken, RequestReceived, RequestTokenized, RequestFinished, PolicySwapped)
REMEMBERED = 4096
"""Requests whose tenant is remembered until it is known what part of the prefix tree is theirs."""


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds, of `count` values."""

    count: int
    p50: float
    p90: float
    p99: float


class Process(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    pid: int | None
    generation: int
    state: str
    restarts: int
    progress_age_s: float | None
    resident: int | None
    """Bytes."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """In blocks; `tenants` have these in the prefix tree, in use or not."""

    total: int
    used: int
    cached: int
    free: int
    tenants: list[tuple[str, int]]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Since its actor started (or it was set)."""

    group: str
    name: str
    calls: int
    mean_us: float
    rejected: int
    tripped: bool


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per second, None at the first look; `hit_rate` is of prompt tokens, `acceptance` of guesses since the
    start, None where there were none. `history` has tokens per second, running and waiting at the last looks."""

    model: str
    address: str
    state: str
    notes: list[str]
    window_s: float
    processes: list[Process]
    running: int
    waiting: int
    preemptions: int
    steps_per_s: float | None
    tokens_per_s: float | None
    latencies: dict[str, Percentiles]
    """Of ttft, itl, tpot and e2e."""
    hit_rate: float | None
    acceptance: float | None
    pool: Pool
    policies: list[Policy]
    history: list[tuple[float, int, int]]


class Live:
    """Looks at one daemon."""

    def __init__(self, info: RunInfo, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._info = info
        self._clock = clock
        self._tail = Tail(info.path, ("tokenizer", "scheduler", "kv"), KINDS)
        self._taken: deque[tuple[int, RequestTaken]] = deque()
        self._finished: deque[tuple[int, int, int]] = deque()
        """When, prompt tokens, those of them from the cache."""
        self._tenant_of: dict[str, str] = {}
        self._tenants: dict[str, str] = {}
        """By the name of their part of the prefix tree."""
        self._policies = _configured(info.path)
        self._looks: deque[tuple[int, int, int]] = deque()
        """When, steps and tokens, of the last seconds."""
        self._history: deque[tuple[float, int, int]] = deque(maxlen=KEPT_LOOKS)

    def look(self, status: Status) -> Figures:
        now_ns = self._clock()
        for line in self._tail.new():
            self._take(line)
        since_ns = now_ns - int(WINDOW_S * 1e9)
        while self._taken and self._taken[0][0] < since_ns:
            self._taken.popleft()
        while self._finished and self._finished[0][0] < since_ns:
            self._finished.popleft()
        stats = {actor.role: actor.stats for actor in status.actors}
        scheduler, executor = stats.get("scheduler", {}), stats.get("executor", {})
        steps_per_s, tokens_per_s = self._rates(now_ns, executor.get("steps", 0), executor.get("tokens", 0))
        running, waiting = scheduler.get("running", 0), scheduler.get("waiting", 0)
        self._history.append((tokens_per_s or 0.0, running, waiting))
        return Figures(
            model=self._info.model,
            address=self._info.address or self._info.run_dir,
            state=status.state,
            notes=status.notes,
            window_s=WINDOW_S,
            processes=[_process(actor) for actor in status.actors],
            running=running,
            waiting=waiting,
            preemptions=scheduler.get("preemptions", 0),
            steps_per_s=steps_per_s,
            tokens_per_s=tokens_per_s,
            latencies=self._latencies(),
            hit_rate=_share(sum(one[2] for one in self._finished), sum(one[1] for one in self._finished)),
            acceptance=_share(scheduler.get("accepted", 0), scheduler.get("drafted", 0)),
            pool=self._pool(stats.get("kv", {})),
            policies=[
                policy for actor in ("scheduler", "kv") for policy in policies_of(stats.get(actor, {}), self._policies)
            ],
            history=list(self._history),
        )

    def _take(self, line: Line) -> None:
        event = line.event
        match event:
            case RequestTaken():
                self._taken.append((line.ts_ns, event))
            case RequestFinished(choice=0):
                self._finished.append((line.ts_ns, event.prompt_tokens, event.cached))
            case RequestReceived():
                self._tenant_of[event.request_id] = event.tenant
                while len(self._tenant_of) > REMEMBERED:
                    del self._tenant_of[next(iter(self._tenant_of))]
            case RequestTokenized():
                tenant = self._tenant_of.pop(event.request_id, None)
                if tenant is not None:
                    self._tenants[event.namespace] = tenant
            case PolicySwapped():
                self._policies[event.group] = event.new
            case _:
                pass

    def _rates(self, now_ns: int, steps: int, tokens: int) -> tuple[float | None, float | None]:
        if self._looks and steps < self._looks[-1][1]:
            self._looks.clear()  # another process counts anew
        while len(self._looks) > 1 and self._looks[1][0] < now_ns - RATES_S * 1e9:
            self._looks.popleft()
        self._looks.append((now_ns, steps, tokens))
        then_ns, steps_then, tokens_then = self._looks[0]
        if then_ns == now_ns:
            return None, None
        seconds = (now_ns - then_ns) / 1e9
        return (steps - steps_then) / seconds, (tokens - tokens_then) / seconds

    def _latencies(self) -> dict[str, Percentiles]:
        taken = [event for _, event in self._taken]
        return {
            "ttft": percentiles(event.ttft_ns for event in taken),
            "itl": percentiles(event.itl_ns for event in taken),
            "tpot": percentiles(event.tpot_ns for event in taken),
            "e2e": percentiles(event.e2e_ns for event in taken),
        }

    def _pool(self, kv: dict[str, int]) -> Pool:
        total, free, used = (kv.get(f"{name}_blocks", 0) for name in ("total", "free", "used"))
        tenants = []
        for name, blocks in kv.items():
            if name.startswith("namespace_") and name.endswith("_blocks"):
                namespace = name.removeprefix("namespace_").removesuffix("_blocks")
                tenants.append((self._tenants.get(namespace, namespace) or "(no tenant)", blocks))
        return Pool(total=total, used=used, cached=max(0, total - free - used), free=free, tenants=tenants)


def percentiles(values_ns: Iterable[int | None]) -> Percentiles:
    """Of those that are known; the nearest rank. All 0 where there are none."""
    known = sorted(value for value in values_ns if value is not None)
    if not known:
        return Percentiles(0, 0.0, 0.0, 0.0)
    ranks = (known[min(len(known) - 1, int(share * len(known)))] / 1e6 for share in (0.5, 0.9, 0.99))
    return Percentiles(len(known), *ranks)


def policies_of(stats: dict[str, int], names: dict[str, str]) -> list[Policy]:
    """Those that an actor's numbers speak of."""
    found = []
    for key, calls in stats.items():
        group = key.removeprefix("policy_").removesuffix("_calls")
        if key == f"policy_{group}_calls":
            found.append(
                Policy(
                    group=group,
                    name=names.get(group, "?"),
                    calls=calls,
                    mean_us=stats.get(f"policy_{group}_us", 0) / max(1, calls),
                    rejected=stats.get(f"policy_{group}_rejected", 0),
                    tripped=bool(stats.get(f"policy_{group}_tripped", 0)),
                )
            )
    return found


def _configured(path: Path) -> dict[str, str]:
    try:
        policies = read_config(path).policies
    except (OSError, msgspec.MsgspecError):
        return {}
    fields = msgspec.structs.asdict(policies)
    return {group: name for group, name in fields.items() if isinstance(name, str)}


def _process(actor: ActorStatus) -> Process:
    memory = None if actor.pid is None else process_memory(actor.pid)
    return Process(
        role=actor.role,
        pid=actor.pid,
        generation=actor.generation,
        state=actor.state,
        restarts=actor.restarts,
        progress_age_s=actor.progress_age_s,
        resident=None if memory is None else memory.resident,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
