"""Requests and their sequences, as the scheduler knows them: the cold data, one object per (request, choice)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from octavo.core.messages import Enqueue, TokenLogprob

SUSPECT_DEATHS = 2
"""Executor deaths in whose steps a sequence was, after which it only runs alone."""
CLEARED_AFTER = 16
"""Tokens that a sequence produces after an executor death to be no longer suspected of it."""


class State(Enum):
    WAITING = "waiting"
    RESIDENT = "resident"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, and who to answer: `handle` and `attempt` are the client's latest."""

    asked: Enqueue
    handle: int
    attempt: int
    arrival_ns: int
    order: int
    tenant: int
    prompt_len: int
    limit: int
    """Most tokens of a choice, prompt and output together."""
    stop_ids: frozenset[int]
    orphan: bool = False
    """Its client's tokenizer was lost and it was not resumed since."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's second token, its third, …: collected from the chunks of any of its sequences."""
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.asked.request_id

    @property
    def computes_prompt(self) -> bool:
        """Whether the whole prompt is still to be computed, cached or not, for its log-probabilities."""
        return self.asked.sampling.prompt_logprobs >= 0 and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def done(self) -> bool:
        return all(s.state is State.DONE for s in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. `tokens` are the prompt and all outputs so far.

    While resident it has a `slot` and an `open_id`. The `open_id` outlives the slot, so that a result still in flight
    when it was preempted counts; the next residency has another one."""

    request: Request
    choice: int
    seq_id: int
    tokens: list[int]
    queued_ns: int
    state: State = State.WAITING
    slot: int = -1
    open_id: int = -1
    hint: int | None = None
    """Cached tokens as the KV-manager last said; None while it has not answered."""
    fork_of: Sequence | None = None
    """Shares this sequence's prompt instead of computing it, if it can."""
    blocked: str = ""
    """The resource that it was last said to wait for."""
    cached: int = -1
    """Tokens that its first admission found in the tree (or in its parent)."""
    admitted_ns: int = 0
    """When it first took a slot."""
    first_ns: int = 0
    """When its first output came, if it came to this scheduler."""
    preemptions: int = 0
    deaths: int = 0
    died_at: int = 0
    """Tokens it had at the last executor death."""
    dropped: int = 0
    """Tokens sampled for it that were not part of the answer."""
    drafted: int = 0
    """Guesses verified for it; all that were not right were computed in vain."""
    accepted: int = 0
    """Guesses that were right."""
    finish: str = ""
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Of the last outputs, if they were asked for: kept so that a resume can say them again."""

    def logprobs_from(self, output: int) -> list[TokenLogprob | None] | None:
        """Of the outputs from index `output` on, if they were asked for; None where they are not known."""
        if self.request.asked.sampling.logprobs < 0:
            return None
        known = self.logprobs[-(self.outputs - output) :]
        return [None] * (self.outputs - output - len(known)) + known

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS

    @property
    def order(self) -> tuple[int, int, int]:
        """Arrival order: total, and stable over preemption and recovery."""
        return (self.request.arrival_ns, self.request.order, self.choice)
