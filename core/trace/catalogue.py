"""Every event that Octavo emits, as types. Nothing here writes: see `emit`.

One event is one JSON line. The line's common fields are added where it is written, see `Common`. What is said here of
each event is what the table in EVENTS.md is made of (`catalogue_doc`).
Times are nanoseconds, sizes tokens or blocks as named.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base of the catalogue; the tag is the event's name."""


def catalogue() -> dict[str, type[Event]]:
    """Every event by its name, in the order of this file."""
    found: dict[str, type[Event]] = {}
    kinds = [Event]
    while kinds:
        kind = kinds.pop(0)
        kinds = [*kind.__subclasses__(), *kinds]
        tag = kind.__struct_config__.tag
        if isinstance(tag, str) and "." in tag:
            found[tag] = kind
    return found


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What every line has beside the event's own fields.

    `ts_ns` is monotonic and comparable between the processes of one host: when the emitter was told what caused the
    event (the `now_ns` of its core), so that differences between events are exactly what the cores saw. `spent_ns`
    passed from then until it was emitted: what the actor computed and sent for that cause.
    """

    ts_ns: int
    spent_ns: int
    role: str
    replica: int
    generation: int


class TraceOpened(Event, frozen=True, kw_only=True, tag="trace.opened"):
    """A process begins to write: at `ts_ns` it was `wall_ns` since 1970, which tells the time of all other events."""

    pid: int
    wall_ns: int


class RequestEvent(Event, frozen=True, kw_only=True):
    """Base of what happens to one request; a choice is numbered where it has one."""

    request_id: str


class RequestReceived(RequestEvent, frozen=True, kw_only=True, tag="request.received"):
    """A client submitted it (or resumed it, attempt > 0)."""

    trace_id: str
    attempt: int
    tenant: str
    received_ns: int


class RequestTokenized(RequestEvent, frozen=True, kw_only=True, tag="request.tokenized"):
    """Its prompt is known as ids and goes to the scheduler. `max_tokens` bounds each of the `n` choices. `namespace` is
    the part of the prefix tree that it may use: the first bytes of its name, as in the KV-manager's numbers. `adapter`
    is the LoRA adapter that answers, if one does."""

    prompt_tokens: int
    max_tokens: int | None
    n: int
    namespace: str
    adapter: str = ""


class RequestQueued(RequestEvent, frozen=True, kw_only=True, tag="request.queued"):
    """It waits in the scheduler; `ahead` sequences were waiting before it."""

    trace_id: str
    attempt: int
    prompt_tokens: int
    n: int
    ahead: int


class RequestMatched(RequestEvent, frozen=True, kw_only=True, tag="request.matched"):
    """The prefix tree holds its first `cached` of `known` tokens (a hint until it is admitted), the last `swapped` of
    them in host memory.

    `miss` says why not more: "" (all whole blocks are there), `short` (it has no whole block to look up),
    `disabled`, `computed` (asked to compute its prompt, for log-probabilities), `new` (no common prefix: its first
    token is that of none), `ends` (nothing was seen after this prefix), `differs` (what is there goes on differently:
    token `at` is the first that differs), `generated` (from token `at` on it is there as it was generated, and prompts
    are computed apart), `tenant` (another tenant or adapter has its first `at` tokens, which are not
    shared), `evicted` (the next block was there, but its room was needed at `evicted_ns`, else 0).
    """

    choice: int
    cached: int
    swapped: int
    known: int
    miss: str
    at: int
    evicted_ns: int


class RequestBlocked(RequestEvent, frozen=True, kw_only=True, tag="request.blocked"):
    """It is the first to wait for `resource`; those queued after it wait for it. Said once per change of resource.

    `slots` (all are taken), `blocks` (its prompt needs `need`, the credit is `have`), `budget` (the step's tokens went
    to others: it needs `need`, `have` are left), `match` (the KV-manager has not answered), `parent` (it shares the
    prompt of a choice that is not computed yet), `suspect` (somebody runs alone, for fear of another executor death),
    `preemption` (the step has just taken blocks from others), `policy` (the batching policy did not choose it).
    """

    choice: int
    step: int
    resource: str
    need: int
    have: int


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
    """The step computes its `tokens` known tokens from position `start` on."""

    choice: int
    step: int
    start: int
    tokens: int


class RequestFirstToken(RequestEvent, frozen=True, kw_only=True, tag="request.first_token"):
    """The scheduler has the first token of the choice's answer."""

    choice: int
    step: int
    since_queued_ns: int


class RequestPreempted(RequestEvent, frozen=True, kw_only=True, tag="request.preempted"):
    """It gave up its slot; `lost` tokens may have to be computed again (`mode` recompute), or copied back, where what
    is evicted of them goes to host memory (swap). `by` is the request that asked for most of the blocks that were
    short; `need_blocks` are still short after this preemption, with a credit of `credit`."""

    choice: int
    step: int
    mode: str
    lost: int
    need_blocks: int
    credit: int
    by: str


class RequestResumed(RequestEvent, frozen=True, kw_only=True, tag="request.resumed"):
    """A client came back after a lost process; `delivered` output tokens over all choices are kept."""

    attempt: int
    delivered: int


class RequestRecovered(RequestEvent, frozen=True, kw_only=True, tag="request.recovered"):
    """Its KV was lost with a process; it waits to be computed again."""

    choice: int
    deaths: int


class RequestFinished(RequestEvent, frozen=True, kw_only=True, tag="request.finished"):
    """A choice ended in the scheduler. `dropped` tokens were sampled but not part of the answer. Of `drafted` guesses
    that were verified, `accepted` were right."""

    choice: int
    finish: str
    detail: str
    prompt_tokens: int
    output_tokens: int
    cached: int
    dropped: int
    preemptions: int
    since_queued_ns: int
    drafted: int = 0
    accepted: int = 0


class RequestDelivered(RequestEvent, frozen=True, kw_only=True, tag="request.delivered"):
    """The last row of a choice went to its client."""

    choice: int
    finish: str
    output_tokens: int
    since_received_ns: int


class RequestTaken(RequestEvent, frozen=True, kw_only=True, tag="request.taken"):
    """The client's consumer has taken the last row of a choice: what the client measured, since it asked.

    `itl_ns` is the mean time between two rows, `longest_ns` the longest, `tpot_ns` the time per token after the first
    (None with one token, as the two others with one row). `held_ns` is how long a row lay ready at the client before
    it was taken, at most; `last_held_ns` the same of the last one. The `_off_ns` are these less what the tokenizer saw
    when it sent the rows: the way to the client and its waiting there (None where the tokenizer was another in
    between)."""

    choice: int
    tokens: int
    rows: int
    ttft_ns: int | None
    itl_ns: int | None
    longest_ns: int | None
    tpot_ns: int | None
    e2e_ns: int
    held_ns: int
    last_held_ns: int
    ttft_off_ns: int | None
    itl_off_ns: int | None
    tpot_off_ns: int | None
    e2e_off_ns: int | None


class RequestCancelled(RequestEvent, frozen=True, kw_only=True, tag="request.cancelled"):
    """Nobody wants it any more."""

    why: str


class RequestFailed(RequestEvent, frozen=True, kw_only=True, tag="request.failed"):
    """Refused or given up; `code` as the client sees it."""

    code: str
    reason: str


class StepPlanned(Event, frozen=True, kw_only=True, tag="step.planned"):
    """What the step is to do, the queue and the slots after it, and the credit that is left. Policies took `policy_ns`
    of its planning. `open_ids` are the residencies it computes: decodes first, then chunks (`request.admitted` says
    whose they are). Decodes alone may be computed several `rounds` in a row, which give a token each."""

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
    policy_ns: int
    open_ids: list[int]
    rounds: int = 1


class StepBound(Event, frozen=True, kw_only=True, tag="step.bound"):
    """The KV-manager found room for the step: blocks taken and evicted, and what the pool holds after it; of those
    taken, how many were swapped in from host memory. The eviction policy took `policy_ns` of it."""

    step: int
    allocated: int
    free: int
    evictable: int
    evicted: int
    copies: int
    swapped_in: int
    skipped: int
    policy_ns: int


class StepExecuted(Event, frozen=True, kw_only=True, tag="step.executed"):
    """The executor ran it, for `execute_ns` from `started_ns` on: `rows` sequences gave `tokens` new tokens.
    The rest is its work as `core.work` counts it, which a cost model is fitted to. Of the numbers that went into KV in
    fp8, `saturated` were beyond its range and became its greatest."""

    step: int
    rows: int
    tokens: int
    started_ns: int
    execute_ns: int
    prefill_tokens: int
    decodes: int
    attention: int
    kv_tokens: int
    copied: int = 0
    rounds: int = 1
    guesses: int = 0
    saturated: int = 0


class MemoryMeasured(Event, frozen=True, kw_only=True, tag="memory.measured"):
    """What the executor's process holds, in bytes, at a `moment`: `before_load`, `after_load`, `warmed_up` (after its
    first steps) or `under_load` (now and then, more and more seldom). Of the host `resident` is `anonymous` and mapped
    `file` memory, `peak` the most so far; of the device what tensors hold and what is held for them (None without
    one). The KV pool is `blocks` of `block_bytes`, 0 before it is made; `adapters` are what LoRA adapters hold."""

    moment: str
    steps: int
    resident: int
    anonymous: int
    file: int
    peak: int
    device_allocated: int | None
    device_reserved: int | None
    block_bytes: int
    blocks: int
    adapters: int = 0


class StepCompleted(Event, frozen=True, kw_only=True, tag="step.completed"):
    """The scheduler has the result; `latency_ns` since the plan was made. Of `drafted` guesses that were verified,
    `accepted` were right."""

    step: int
    new_tokens: int
    latency_ns: int
    drafted: int = 0
    accepted: int = 0


class KvEvicted(Event, frozen=True, kw_only=True, tag="kv.evicted"):
    """Cached blocks that nobody used were given up for the step; of these, `swapped_out` went to host memory."""

    step: int
    blocks: int
    swapped_out: int


class KvFlushed(Event, frozen=True, kw_only=True, tag="kv.flushed"):
    """Somebody had the prefix tree emptied: of one tenant if it is named, of what begins with a prefix of so many
    tokens. `freed` blocks are free; `in_use` ones are when the sequences that use them end. `from_host` were in host
    memory."""

    tenant: str | None
    prefix_tokens: int
    freed: int
    in_use: int
    from_host: int


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


class PolicyTripped(Event, frozen=True, kw_only=True, tag="policy.tripped"):
    """A policy gave too many bad or slow answers, or hung, or took its process with it: the built-in rule stands in for
    it until it is swapped. `dump` is the last call, to be repeated with `octavo.core.policy.dump`; of a process that is
    gone there is none."""

    group: str
    policy: str
    why: str
    dump: dict[str, Any]


class PolicySwapped(Event, frozen=True, kw_only=True, tag="policy.swapped"):
    """Another policy answers from the next step on."""

    group: str
    old: str
    new: str
    options: dict[str, Any]


class PolicyNotSwapped(Event, frozen=True, kw_only=True, tag="policy.not_swapped"):
    """A swap was asked for that cannot be made; the policy stays."""

    group: str
    policy: str
    why: str


class ShadowStarted(Event, frozen=True, kw_only=True, tag="shadow.started"):
    """A policy begins to answer beside the live one of its group, without effect."""

    group: str
    policy: str
    pid: int
    options: dict[str, Any]


class ShadowEnded(Event, frozen=True, kw_only=True, tag="shadow.ended"):
    """Its process has ended by itself; a negative `code` is a signal."""

    group: str
    policy: str
    pid: int
    code: int


class ActorStarted(Event, frozen=True, kw_only=True, tag="actor.started"):
    """Its process was started; it may load for a while."""

    actor: str
    pid: int
    actor_generation: int


class ActorReady(Event, frozen=True, kw_only=True, tag="actor.ready"):
    """It has loaded, `took_ns` after its start. `how` is how an executor computes, `drafter` who guesses for it."""

    actor: str
    pid: int
    actor_generation: int
    took_ns: int
    how: str = ""
    drafter: str = ""


class ActorStalled(Event, frozen=True, kw_only=True, tag="actor.stalled"):
    """It does not move any more, and is killed."""

    actor: str
    pid: int
    why: str


class ActorExited(Event, frozen=True, kw_only=True, tag="actor.exited"):
    """Its process has ended; a negative `code` is a signal."""

    actor: str
    pid: int
    actor_generation: int
    code: int


class ActorRestarted(Event, frozen=True, kw_only=True, tag="actor.restarted"):
    """It is started anew, for the `restarts`th time."""

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


class RecordEnded(Event, frozen=True, kw_only=True, tag="record.ended"):
    """The actor's recording has reached `trace.record_bytes`, or found the disk full: what came until then, `bytes` of
    it, can be replayed."""

    bytes: int


class ServiceState(Event, frozen=True, kw_only=True, tag="service.state"):
    """The service as a whole is starting, ready, degraded, draining, stopped or failed."""

    state: str
    why: str
