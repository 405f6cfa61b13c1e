"""Every event that Octavo emits, as types. Nothing here writes: see `emit`.

One event is one JSON line. The line's common fields are added where it is written: `ts_ns` (monotonic,
comparable between processes of one host), `role`, `replica`, `generation`, `event` (the name).
Times are nanoseconds, sizes tokens or blocks as named.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base of the catalogue; the tag is the event's name."""


class RequestEvent(Event, frozen=True, kw_only=True):
    request_id: str


class RequestReceived(RequestEvent, frozen=True, kw_only=True, tag="request.received"):
    """A client submitted it (or resumed it, attempt > 0)."""

    trace_id: str
    attempt: int
    tenant: str
    received_ns: int


class RequestTokenized(RequestEvent, frozen=True, kw_only=True, tag="request.tokenized"):
    prompt_tokens: int
    max_tokens: int | None
    n: int


class RequestQueued(RequestEvent, frozen=True, kw_only=True, tag="request.queued"):
    """It waits in the scheduler; `ahead` sequences were waiting before it."""

    trace_id: str
    attempt: int
    prompt_tokens: int
    n: int
    ahead: int


class RequestMatched(RequestEvent, frozen=True, kw_only=True, tag="request.matched"):
    """The prefix tree holds its first `cached` tokens (a hint until it is admitted)."""

    choice: int
    cached: int
    known: int


class RequestAdmitted(RequestEvent, frozen=True, kw_only=True, tag="request.admitted"):
    """It took a slot. `how` is open or fork; waited since it was queued (or preempted)."""

    choice: int
    step: int
    slot: int
    open_id: int
    how: str
    cached: int
    waited_ns: int


class RequestRebased(RequestEvent, frozen=True, kw_only=True, tag="request.rebased"):
    """The KV-manager bound less than planned (a hint had gone stale, a fork lost its parent)."""

    choice: int
    step: int
    end: int


class RequestChunk(RequestEvent, frozen=True, kw_only=True, tag="request.chunk"):
    choice: int
    step: int
    start: int
    tokens: int


class RequestFirstToken(RequestEvent, frozen=True, kw_only=True, tag="request.first_token"):
    choice: int
    step: int
    since_queued_ns: int


class RequestPreempted(RequestEvent, frozen=True, kw_only=True, tag="request.preempted"):
    """It gave up its slot; `lost` tokens may have to be computed again."""

    choice: int
    step: int
    mode: str
    lost: int
    need_blocks: int
    credit: int


class RequestResumed(RequestEvent, frozen=True, kw_only=True, tag="request.resumed"):
    """A client came back after a lost process; `delivered` output tokens over all choices are kept."""

    attempt: int
    delivered: int


class RequestRecovered(RequestEvent, frozen=True, kw_only=True, tag="request.recovered"):
    """Its KV was lost with a process; it waits to be computed again."""

    choice: int
    deaths: int


class RequestFinished(RequestEvent, frozen=True, kw_only=True, tag="request.finished"):
    """A choice ended in the scheduler. `dropped` tokens were sampled but not part of the answer."""

    choice: int
    finish: str
    detail: str
    prompt_tokens: int
    output_tokens: int
    cached: int
    dropped: int
    preemptions: int
    since_queued_ns: int


class RequestDelivered(RequestEvent, frozen=True, kw_only=True, tag="request.delivered"):
    """The last row of a choice went to its client."""

    choice: int
    finish: str
    output_tokens: int
    since_received_ns: int


class RequestCancelled(RequestEvent, frozen=True, kw_only=True, tag="request.cancelled"):
    why: str


class RequestFailed(RequestEvent, frozen=True, kw_only=True, tag="request.failed"):
    """Refused or given up; `code` as the client sees it."""

    code: str
    reason: str


class StepPlanned(Event, frozen=True, kw_only=True, tag="step.planned"):
    step: int
    sequences: int
    prefill_tokens: int
    decode_tokens: int
    opens: int
    forks: int
    releases: int
    waiting: int
    running: int
    credit: int


class StepBound(Event, frozen=True, kw_only=True, tag="step.bound"):
    step: int
    allocated: int
    free: int
    evictable: int
    evicted: int
    copies: int
    skipped: int


class StepExecuted(Event, frozen=True, kw_only=True, tag="step.executed"):
    step: int
    rows: int
    tokens: int
    execute_ns: int


class StepCompleted(Event, frozen=True, kw_only=True, tag="step.completed"):
    """The scheduler has the result; `latency_ns` since the plan was made."""

    step: int
    new_tokens: int
    latency_ns: int


class KvEvicted(Event, frozen=True, kw_only=True, tag="kv.evicted"):
    step: int
    blocks: int


class KvOverdraft(Event, frozen=True, kw_only=True, tag="kv.overdraft"):
    """A plan asked for more blocks than there are: the scheduler spent credit it did not have. What fits was bound."""

    step: int
    need: int
    available: int


class KvLeak(Event, frozen=True, kw_only=True, tag="kv.leak"):
    """The pool's accounts disagree; they were repaired. `dump` says which blocks."""

    total: int
    free: int
    cached: int
    in_use: int
    dump: str


class PolicyRejected(Event, frozen=True, kw_only=True, tag="policy.rejected"):
    """A policy's answer was not valid; the built-in rule was used for this step."""

    group: str
    policy: str
    why: str


class ActorStarted(Event, frozen=True, kw_only=True, tag="actor.started"):
    actor: str
    pid: int
    actor_generation: int


class ActorReady(Event, frozen=True, kw_only=True, tag="actor.ready"):
    actor: str
    pid: int
    actor_generation: int
    took_ns: int


class ActorStalled(Event, frozen=True, kw_only=True, tag="actor.stalled"):
    actor: str
    pid: int
    why: str


class ActorExited(Event, frozen=True, kw_only=True, tag="actor.exited"):
    actor: str
    pid: int
    actor_generation: int
    code: int


class ActorRestarted(Event, frozen=True, kw_only=True, tag="actor.restarted"):
    actor: str
    actor_generation: int
    restarts: int


class GenerationBumped(Event, frozen=True, kw_only=True, tag="generation.bumped"):
    """The state of `actor` was lost; peers fence what it sent before."""

    actor: str
    actor_generation: int
    why: str


class WireDropped(Event, frozen=True, kw_only=True, tag="wire.dropped"):
    """A frame was not delivered: fenced by generation, undecodable, or its peer's queue was full."""

    peer: str
    why: str


class ServiceState(Event, frozen=True, kw_only=True, tag="service.state"):
    """starting, ready, degraded, draining, stopped, failed."""

    state: str
    why: str
