"""The contract between the kernel and its policies: frozen views in, intents out.

A policy is a pure adviser. It sees columns (read-only numpy arrays, one value per sequence or block) and says
what it would like; the kernel checks the answer and turns it into a plan. Whatever a policy returns, the kernel
keeps its invariants; an answer that is not valid is replaced by the built-in rule and reported.

Nothing of Octavo is imported here: a policy package needs this module and numpy, nothing else. Time and
randomness come from the view, never from the clock, so that a simulation and a replay see the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

CONTRACT_VERSION = 1

Ints: TypeAlias = npt.NDArray[np.int32]
Times: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]


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


@dataclass(frozen=True, slots=True)
class Waiting:
    """Sequences without a slot, oldest arrival first; every column has shape [waiting]."""

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
    """By when it should be done, ns; the largest int64 if there is none."""
    tenant: Ints
    """Index of its tenant, stable for the run."""
    preemptions: Ints
    """How often it lost its slot."""

    def __len__(self) -> int:
        return len(self.known)


@dataclass(frozen=True, slots=True)
class Running:
    """Resident sequences; every column has shape [running]."""

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

    def __len__(self) -> int:
        return len(self.known)


@dataclass(frozen=True, slots=True)
class Leaves:
    """Cached blocks that nothing refers to and on which no cached block depends; columns have shape [leaves]."""

    last_used_ns: Times
    """Time of the last step that used the block."""
    last_used: Times
    """The same as a strictly growing count, for telling blocks of one step apart."""
    hits: Ints
    """How many admissions found it in the tree."""
    depth: Ints
    """Blocks before it in its prefix."""

    def __len__(self) -> int:
        return len(self.depth)


@dataclass(frozen=True, slots=True)
class Selection:
    """A batching policy's intent."""

    admit: Ints
    """Indices into `Waiting`, in the order in which they should be admitted."""
    when_blocked: Literal["stop", "skip"] = "stop"
    """If one does not fit: stop admitting, or go on with the next."""
    decode: Mask | None = None
    """Which of `Running` should decode in this step; None means all that can."""


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
        `need` blocks come free. The kernel stops when the need is met and goes on by itself if they are too few."""
        ...


class Eviction(Protocol):
    """Entry-point group `octavo.eviction`."""

    def rank(self, need: int, leaves: Leaves) -> Floats:
        """Score the leaves [leaves], finite: the lowest are evicted first, until `need` blocks are free."""
        ...


class Speculation(Protocol):
    """Entry-point group `octavo.speculation`."""

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        """Tokens to draft for each of `running` that decodes, shape [running], at least 0."""
        ...
