"""What clients ask in a simulation: sessions of turns, and the built-in workloads, each a documented distribution.

Prompts are made of segments: a seed and a length stand for the same token ids whenever they occur, so that a hundred
thousand requests cost no memory and share prefixes as real ones do. Knows nothing of how they are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from octavo.core.messages import Col

_MIX = (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
_IDS = 1 << 30


class Segment(NamedTuple):
    """The first `n` tokens of the text that `seed` stands for."""

    seed: int
    n: int

    def ids(self) -> Col:
        """splitmix64 over (seed, position), shape [n]."""
        x = np.arange(self.n, dtype=np.uint64) + np.uint64((self.seed * _MIX[0] + 1) % (1 << 64))
        x *= np.uint64(_MIX[0])
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[1])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[2])
        return ((x ^ (x >> np.uint64(31))) % np.uint64(_IDS)).astype(np.int32)


class Turn(NamedTuple):
    """One request. Its prompt is all of the session so far (prompts and answers), then `new`."""

    new: tuple[Segment, ...] | Col
    output: int
    """Tokens of the answer."""
    think_s: float = 0.0
    """From the end of the turn before to this one."""
    name: str = ""
    """Its request id; "" makes one from the session."""
    others: tuple[int, ...] = ()
    """Tokens of the answers of further choices (n > 1)."""
    limit: int | None = 0
    """The max_tokens that it asks for, None for none; an answer that is shorter is stopped by its client, as by a stop
    string. 0 is the longest answer."""
    cancel_s: float | None = None
    """So long after it was asked nobody wants it any more."""

    def new_ids(self) -> Col:
        if isinstance(self.new, np.ndarray):
            return self.new
        return np.concatenate([segment.ids() for segment in self.new]) if self.new else np.zeros(0, dtype=np.int32)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Tokens of the answer of each choice."""
        return self.output, *self.others

    @property
    def max_tokens(self) -> int | None:
        return max(self.outputs) if self.limit == 0 else self.limit

    @property
    def new_tokens(self) -> int:
        return len(self.new) if isinstance(self.new, np.ndarray) else sum(segment.n for segment in self.new)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other: the next one comes when the one before was answered."""

    start_s: float
    turns: tuple[Turn, ...]
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    """Each turn should be answered this long after it was asked."""


Workload = Iterator[Session]
"""In order of `start_s`; endless ones are cut by the number of requests."""

_NEW = 1 << 40
"""Seeds of segments that nobody shares count on from here."""


class _Draw:
    """Random lengths and times, and fresh seeds, for one workload."""

    def __init__(self, seed: int, rate: float, turns: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.fresh = count(_NEW + (seed << 44))
        self._between = turns / rate
        self.now = 0.0

    def length(self, median: float, sigma: float, most: int) -> int:
        """Lognormal, cut to [1, most]."""
        return min(most, max(1, round(float(self.rng.lognormal(np.log(median), sigma)))))

    def wait(self, mean: float) -> float:
        return float(self.rng.exponential(mean))

    def poisson(self) -> float:
        """The next arrival: exponential gaps, so that requests (sessions times turns) come at `rate` a second."""
        self.now += self.wait(self._between)
        return self.now

    def text(self, n: int) -> Segment:
        """Text that nobody else has."""
        return Segment(next(self.fresh), n)


def chat(rate: float, seed: int) -> Workload:
    """Conversations: Poisson sessions; 1 + Poisson(3) turns; a shared system prompt of 64 tokens; questions lognormal
    (median 40, σ 0.8, at most 512), answers lognormal (median 80, σ 0.7, at most 512); 5 s (exponential) to think."""
    draw = _Draw(seed, rate, turns=4)
    system = Segment(1, 64)
    while True:
        turns = []
        start = draw.poisson()
        for i in range(1 + int(draw.rng.poisson(3))):
            question = draw.text(draw.length(40, 0.8, 512))
            new = (system, question) if i == 0 else (question,)
            turns.append(Turn(new, draw.length(80, 0.7, 512), draw.wait(5.0) if i else 0.0))
        yield Session(start, tuple(turns))


def shared(rate: float, seed: int) -> Workload:
    """Few long system prompts: Poisson; one of 4 prompts of 512 tokens (Zipf: 1, 1/2, 1/3, 1/4), then a question,
    lognormal (median 50, σ 0.7, at most 512); answers lognormal (median 60, σ 0.6, at most 256)."""
    draw = _Draw(seed, rate)
    weights = 1 / np.arange(1, 5)
    weights /= weights.sum()
    while True:
        system = Segment(1 + int(draw.rng.choice(4, p=weights)), 512)
        question = draw.text(draw.length(50, 0.7, 512))
        yield Session(draw.poisson(), (Turn((system, question), draw.length(60, 0.6, 256)),))


def mix(rate: float, seed: int) -> Workload:
    """Long and short: Poisson; four of five are short (prompt median 48, answer median 32), urgent (priority 1) and due
    in 30 s, the others long (prompt median 1024, answer median 192) and due in 300 s; lognormal, σ 0.4, prompts at most
    4096, answers at most 512."""
    draw = _Draw(seed, rate)
    while True:
        long = draw.rng.random() < 0.2
        prompt, answer = (1024, 192) if long else (48, 32)
        turn = Turn((draw.text(draw.length(prompt, 0.4, 4096)),), draw.length(answer, 0.4, 512))
        yield Session(draw.poisson(), (turn,), priority=0 if long else 1, deadline_s=300.0 if long else 30.0)


def bursts(rate: float, seed: int) -> Workload:
    """Calm and storm: Poisson, at 3.25 times the rate for 10 s (exponential), then at a quarter of it for 30 s;
    prompts lognormal (median 128, σ 0.8, at most 2048), answers lognormal (median 64, σ 0.6, at most 512)."""
    draw = _Draw(seed, rate)
    now, until, storm = 0.0, draw.wait(30.0), False
    while True:
        gap = draw.wait(1 / (rate * (3.25 if storm else 0.25)))
        if now + gap > until:  # exponential gaps have no memory: draw anew at the new rate
            now, storm = until, not storm
            until = now + draw.wait(10.0 if storm else 30.0)
            continue
        now += gap
        yield Session(now, (Turn((draw.text(draw.length(128, 0.8, 2048)),), draw.length(64, 0.6, 512)),))


def tenants(rate: float, seed: int) -> Workload:
    """Many tenants: Poisson; 20 tenants, the k-th with a share of 1/k; each has its own system prompt of 128 tokens;
    the first sends long jobs (prompt median 512, answer median 256), the others short ones (64 and 48); lognormal,
    σ 0.5, prompts at most 4096, answers at most 512."""
    draw = _Draw(seed, rate)
    weights = 1 / np.arange(1, 21)
    weights /= weights.sum()
    while True:
        tenant = int(draw.rng.choice(20, p=weights))
        prompt, answer = (64, 48) if tenant else (512, 256)
        new = (Segment(1 + tenant, 128), draw.text(draw.length(prompt, 0.5, 4096)))
        turn = Turn(new, draw.length(answer, 0.5, 512))
        yield Session(draw.poisson(), (turn,), tenant=f"tenant-{tenant:02}")


def agents(rate: float, seed: int) -> Workload:
    """Agents: Poisson sessions; 2 + Poisson(6) turns over a growing prefix; a shared system prompt of 768 tokens; each
    turn adds a tool's answer, lognormal (median 120, σ 0.8, at most 1024), and takes 40 tokens (median, σ 0.5, at
    most 256); 0.5 s (exponential) for the tool."""
    draw = _Draw(seed, rate, turns=8)
    system = Segment(1, 768)
    while True:
        turns = []
        start = draw.poisson()
        for i in range(2 + int(draw.rng.poisson(6))):
            found = draw.text(draw.length(120, 0.8, 1024))
            new = (system, found) if i == 0 else (found,)
            turns.append(Turn(new, draw.length(40, 0.5, 256), draw.wait(0.5) if i else 0.0))
        yield Session(start, tuple(turns))


BUILT_IN: dict[str, Callable[[float, int], Workload]] = {
    "chat": chat,
    "shared": shared,
    "mix": mix,
    "bursts": bursts,
    "tenants": tenants,
    "agents": agents,
}


def limited(workload: Workload, requests: int | None) -> Workload:
    """The first `requests` turns, the last session cut to fit; None: all."""
    left = requests
    for session in workload:
        if left is None:
            yield session
            continue
        if left <= 0:
            return
        turns = session.turns[:left]
        left -= len(turns)
        yield Session(session.start_s, turns, session.tenant, session.priority, session.deadline_s)
