"""The contract between the kernel and its policies: frozen views in, intents out.

A policy is a pure adviser. It sees columns (read-only numpy arrays, one value per sequence or block) and says
what it would like; the kernel checks the answer and turns it into a plan. Whatever a policy returns, the kernel
keeps its invariants; an answer that is not valid is replaced by the built-in rule and reported.

How a policy is made: an entry point names its class. If the class has an attribute `Options` (a subclass of
`PolicyOptions`), it is made as `Class(options)`, filled and checked from the configuration's
`policies.options.GROUP`; otherwise as `Class()`. A `ValueError` from there stops the start with its message. A class
may say `contract = 1`: then it is refused by an Octavo whose contract is another one, instead of failing in use.

What it may rely on: its methods are called from one thread, one at a time. Time and randomness come from the view
(`now_ns`, `seed`), never from the clock or a generator of its own, so that a simulation and a replay see the same.
It may keep state between calls; the methods `observe` (see `Observer`) and `weigh` (see
`Weighing`) tell it what became of the steps, and what shares tenants have.

Nothing of Octavo is imported here: a policy package needs this module, numpy and msgspec, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

CONTRACT_VERSION = 1
MAX_DRAFTS = 64
"""Tokens that are drafted for a sequence in a step, whatever a policy wants."""

Ints: TypeAlias = npt.NDArray[np.int32]
Times: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]

NEVER = int(np.iinfo(np.int64).max)
"""A time that does not come: no deadline; in `Selection.wake_ns`, no time of one's own."""


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a policy's `Options`: typed fields with defaults; `Annotated[int, msgspec.Meta(ge=1)]` bounds one."""


# ── views ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Step:
    """What holds for the whole step."""

    now_ns: int
    """Kernel time, monotonic, ns; virtual in a simulation."""
    step: int
    """Number of the step being planned."""
    free_slots: int
    """Slots that a waiting sequence could take."""
    credit: int
    """Blocks that this step may still take."""
    chunk_budget: int
    """Most tokens in the step, prefill and decode together."""
    block_size: int
    """Tokens in a block."""
    tenants: tuple[str, ...] = ()
    """Names of the tenants seen so far, by the index that the columns `tenant` hold."""
    seed: int = 0
    """The step's own seed, from the kernel: `numpy.random.default_rng(step.seed)` is all the randomness there is."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Sequences without a slot, oldest arrival first; every column has shape [waiting].

    Where more wait than `scheduler.waiting_window`, these are the oldest, and from behind them the most urgent by
    priority, by deadline, by work (known - cached + output_left), by cached tokens, and tenants' first ones."""

    arrival_ns: Times
    """When the request was queued, ns."""
    known: Ints
    """Tokens known so far: the prompt, and outputs made before a preemption."""
    cached: Ints
    """Of these, the tokens that the prefix tree held when last asked (a hint)."""
    output_left: Ints
    """Most tokens it may still produce."""
    priority: Ints
    """As the client gave it; higher is more urgent."""
    deadline_ns: Times
    """By when it should be done, ns; NEVER if there is none."""
    tenant: Ints
    """Index of its tenant, stable for the run."""
    preemptions: Ints
    """How often it lost its slot."""

    def __len__(self) -> int:
        return len(self.known)


@dataclass(frozen=True, slots=True)
class Running:
    """Resident sequences, oldest arrival first; every column has shape [running]."""

    arrival_ns: Times
    known: Ints
    """Tokens known so far, prompt and outputs."""
    planned: Ints
    """Of these, tokens whose KV is computed or planned."""
    prompt: Ints
    """Tokens of the prompt."""
    output_left: Ints
    priority: Ints
    deadline_ns: Times
    tenant: Ints
    preemptions: Ints
    blocks: Ints
    """Blocks it holds or is promised (shared ones count in full)."""
    decoding: Mask
    """Its whole prompt is planned and it has produced a token."""
    cached: Ints
    """Tokens that it took from the prefix tree when it got its slot: probably there again when it comes back."""
    judged: Ints
    """Guesses of its latest drafts that were judged, the wrong one that ended a draft included; old ones count less."""
    right: Ints
    """Of these, the ones that were right."""

    def __len__(self) -> int:
        return len(self.known)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Cached blocks that nothing refers to and on which no cached block depends; columns have shape [leaves]."""

    last_used_ns: Times
    """Time of the last step that used the block."""
    last_used: Times
    """The same as a strictly growing count, for telling blocks of one step apart; always below 2**52."""
    hits: Ints
    """How many admissions found it in the tree."""
    depth: Ints
    """Blocks before it in its prefix."""
    tenant: Ints
    """Index of the cache namespace that it was computed for: every tenant has its own."""
    held: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int32))
    """Shape [tenants]: cached blocks of each tenant, leaves or not, in use or not."""
    now_ns: int = 0
    """Time of the step that needs the blocks."""
    tenants: tuple[str, ...] = ()
    """Names by the index that the column `tenant` holds."""

    def __len__(self) -> int:
        return len(self.depth)


@dataclass(frozen=True, slots=True)
class Observed:
    """What happened since the last call, in three groups of columns. All times are kernel time, ns."""

    now_ns: int
    # Steps whose results came, in order; shape [steps].
    duration_ns: Times
    """From when the step could begin (its plan, or the result before it) to its result. Several rounds of decodes that
    were planned together (`scheduler.tell_every_ms`) are one step here, and this is of a round."""
    prefill_tokens: Ints
    decodes: Ints
    """Sequences that decoded."""
    drafted: Ints
    """Guesses that were verified: what drafters found, not what was asked of them."""
    accepted: Ints
    """Of these, the ones that were right."""
    # What tenants got in these steps; shape [tenants].
    tenant_prefill: Times
    """Prompt tokens computed for each."""
    tenant_output: Times
    """Tokens produced for each."""
    # Sequences that ended with an answer; shape [finished].
    tenant: Ints
    prompt: Ints
    """Tokens of the prompt."""
    output: Ints
    """Tokens of the answer."""
    preemptions: Ints
    ttft_ns: Times
    """From when it was queued to its first token."""
    total_ns: Times
    """From when it was queued to its end."""
    # Again of steps; shape [steps].
    depth: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Places that guesses were for: `drafted` where they are chains, fewer in trees."""
    asked: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Guesses that drafters had room for; `drafted` is what they found."""
    rounds: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Tokens of each that decoded, one after the other, without guesses and prompts; else 1."""


# ── intents ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Selection:
    """A batching policy's intent. What is admitted, taken or refused in the end is the kernel's word."""

    admit: Ints
    """Indices into `Waiting`, in the order in which they should be admitted."""
    when_blocked: Literal["stop", "skip"] = "stop"
    """If one does not fit: stop admitting, or go on with the next."""
    decode: Mask | None = None
    """Which of `Running` should decode in this step; None means all that can. Nobody is left out for long."""
    preempt: Ints | None = None
    """Indices into `Running` to send back to waiting, first one first, for the sake of the first of `admit`. The kernel
    takes as many as that one needs for a slot and its blocks, none if all would not do, and nobody who was sent back
    too often already. Whoever is sent back is computed again later; what it produced stays."""
    refuse: Ints | None = None
    """Indices into `Waiting` that cannot be served in time: answered with an error (code `deadline`). Only those
    with a deadline can be, and only while their request has produced nothing."""
    wake_ns: int | None = None
    """Ask again at this time even if nothing happens before (NEVER: not of my own accord). Only with it may a policy
    let the engine rest while somebody waits, and not for longer than ten seconds."""


# ── policies ─────────────────────────────────────────────────────────────────────────────────────


class Batching(Protocol):
    """Entry-point group `octavo.batching`."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        """Say who is admitted, in which order, and who decodes."""
        ...


class Chunking(Protocol):
    """Entry-point group `octavo.chunking`."""

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        """Divide the step's budget among prefills.

        `remaining` [prefills] are the tokens each has left to compute, running ones before those about to be
        admitted; `decode_tokens` are already spoken for. Returns tokens per prefill, same shape: each between 0
        and its remaining, together with the decodes at most `step.chunk_budget`."""
        ...


class Preemption(Protocol):
    """Entry-point group `octavo.preemption`."""

    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        """Give indices into `candidates`, first victim first, of sequences to send back to waiting so that about
        `need` blocks come free. The kernel stops when the need is met and goes on by itself if they are too few; those
        that were sent back often already come last whatever is said here."""
        ...


class Eviction(Protocol):
    """Entry-point group `octavo.eviction`."""

    def rank(self, need: int, leaves: Leaves) -> Floats:
        """Score the leaves [leaves], finite: the lowest are evicted first, until `need` blocks are free. Those that
        their request wanted kept go after all others, whatever their scores.

        When a block goes, the one before it in its prefix may become a leaf: then it is asked about alone, and its
        score is compared with those given before. So a score should depend on the leaf more than on its company."""
        ...


class Speculation(Protocol):
    """Entry-point group `octavo.speculation`."""

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        """Tokens to draft for each of `running` that decodes, shape [running], at least 0; above `MAX_DRAFTS` is that
        many."""
        ...


@runtime_checkable
class Observer(Protocol):
    """What a policy of any group but eviction may have beside its own method."""

    def observe(self, observed: Observed) -> None:
        """Learn from what happened. Called off the critical path, at most once a step; of steps that only decode,
        without guesses, up to eight are told together."""
        ...


@runtime_checkable
class Weighing(Protocol):
    """What a policy of any group may have beside its own method."""

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Tenants' shares by name, each time they change while the service runs (`octavo keys`). Who is not named has
        weight 1; what the policy's own options say of a tenant comes before."""
        ...
