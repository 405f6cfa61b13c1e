"""One simulated variant in numbers: hears a machine's events, and sums up with what its clients measured."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np

from octavo.core.messages import Role
from octavo.core.trace.catalogue import (
    Event,
    PolicyRejected,
    PolicyTripped,
    RequestAdmitted,
    RequestChunk,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    StepBound,
    StepExecuted,
)
from octavo.plugins.sim.clients import Measured
from octavo.plugins.sim.metrics import Floats, Slo, Spread, jain, speeds, spread, tpot


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in tokens."""

    variant: str
    requests: int
    """Choices: a request with n > 1 counts n times, here and in all that follows."""
    finished: int
    unserved: dict[str, int]
    """Not served to their end, by code."""
    seconds: float
    """Virtual, from the first request sent to the last token."""
    steps: int
    executor_busy: float
    """Share of `seconds`."""
    ttft: Spread | None
    itl: Spread | None
    """Between tokens, over all of them."""
    tpot: Spread | None
    """Per request: mean time per output token after the first."""
    e2e: Spread | None
    requests_per_s: float
    output_per_s: float
    prompt_per_s: float
    goodput_per_s: float
    """Requests a second that kept the objectives."""
    kept: float
    """Share of requests that kept them."""
    in_time: float | None
    """Share of the requests with a deadline that were answered by then; None if there were none."""
    jain: float
    """Over the speeds of tenants: output tokens a second of their requests, from asked to answered."""
    gap: int
    """Largest difference of service between two tenants that both had something waiting, in weighted tokens: a prompt
    token computed is 1, an output token 2."""
    hit_rate: float
    """Prompt tokens of finished requests that came from the prefix tree."""
    preemptions: int
    evicted: int
    """Blocks."""
    rejected: int
    """Answers of policies that broke the contract."""
    tripped: list[str]
    """Policies that were replaced by the kernel's own rule from some step on, and why: the numbers are not theirs."""
    by_tenant: dict[str, Spread]
    """TTFT of each tenant, if there are several."""


class Times(NamedTuple):
    """A value per request, in seconds, in the order in which they were sent; NaN where there is none."""

    ttft: Floats
    tpot: Floats
    e2e: Floats


class Listener:
    """Counts what a summary needs from the events of a machine."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._waiting: set[tuple[str, int]] = set()
        """Choices."""
        self._counts: Counter[str] = Counter()
        self._tripped: list[str] = []

    def __call__(self, now_ns: int, role: Role, event: Event) -> None:
        counts, measured = self._counts, self._measured
        match event:
            case StepExecuted():
                counts["steps"] += 1
                counts["busy_ns"] += event.execute_ns
                counts["prompt"] += event.prefill_tokens
            case StepBound():
                counts["evicted"] += event.evicted
            case RequestChunk():
                measured.serve_prompt(event.request_id, event.tokens)
            case RequestQueued():
                for choice in range(event.n):
                    self._wait(event.request_id, choice)
            case RequestAdmitted():
                self._leave(event.request_id, event.choice)
            case RequestPreempted():
                counts["preemptions"] += 1
                self._wait(event.request_id, event.choice)
            case RequestFinished():
                self._leave(event.request_id, event.choice)
                if event.choice == 0:  # others share the first one's prompt whatever is cached
                    counts["cached"] += event.cached
                    counts["prompts"] += event.prompt_tokens
            case PolicyRejected():
                counts["rejected"] += 1
            case PolicyTripped():
                self._tripped.append(f"{event.group} {event.policy}: {event.why}")
            case _:
                pass

    def _wait(self, request_id: str, choice: int) -> None:
        self._waiting.add((request_id, choice))
        self._measured.service.waits(self._measured.tenant_of(request_id))

    def _leave(self, request_id: str, choice: int) -> None:
        if (request_id, choice) in self._waiting:
            self._waiting.remove((request_id, choice))
            self._measured.service.leaves(self._measured.tenant_of(request_id))

    def times(self) -> Times:
        """Of the requests that were served to their end."""
        measured = self._measured
        arrival, first, last = (measured.column(name) for name in ("arrival", "first", "last"))
        end, tokens = measured.column("end"), measured.tokens[: measured.rows]
        first, last = np.where(np.isnan(end), np.nan, first), np.where(np.isnan(end), np.nan, last)
        return Times(first - arrival, tpot(first, last, tokens), end - arrival)

    def summary(self, variant: str, finished: int, slo: Slo) -> Summary:
        measured, counts = self._measured, self._counts
        ttft, per_token, e2e = self.times()
        arrival, end, tokens = measured.column("arrival"), measured.column("end"), measured.tokens[: measured.rows]
        seconds = float(np.nanmax(end) - arrival[0]) if finished else 0.0
        over = seconds or 1.0
        kept = int(slo.kept(ttft, per_token, e2e).sum())
        within = measured.column("within")
        asked = ~np.isnan(within)
        return Summary(
            variant=variant,
            requests=measured.rows,
            finished=finished,
            unserved=measured.unserved,
            seconds=seconds,
            steps=counts["steps"],
            executor_busy=counts["busy_ns"] / 1e9 / over,
            ttft=spread(ttft),
            itl=spread(np.frombuffer(measured.gaps, dtype=np.float32).astype(np.float64)),
            tpot=spread(per_token),
            e2e=spread(e2e),
            requests_per_s=finished / over,
            output_per_s=int(tokens.sum()) / over,
            prompt_per_s=counts["prompt"] / over,
            goodput_per_s=kept / over,
            kept=kept / measured.rows if measured.rows else 1.0,
            in_time=float((e2e[asked] <= within[asked]).mean()) if asked.any() else None,
            jain=jain(speeds(measured.tenant[: measured.rows], tokens, e2e)),
            gap=measured.service.gap,
            hit_rate=counts["cached"] / counts["prompts"] if counts["prompts"] else 0.0,
            preemptions=counts["preemptions"],
            evicted=counts["evicted"],
            rejected=counts["rejected"],
            tripped=self._tripped,
            by_tenant=_by_tenant(measured, ttft),
        )


def _by_tenant(measured: Measured, values: Floats) -> dict[str, Spread]:
    if len(measured.tenants) < 2:
        return {}
    numbers = measured.tenant[: measured.rows]
    spreads = {name: spread(values[numbers == number]) for name, number in sorted(measured.tenants.items())}
    return {name: one for name, one in spreads.items() if one is not None}
