"""The policy host: loads the configured policies, and stands between each of them and the kernel.

Every answer is checked for shape and bounds; one that is not valid (or an exception) is replaced by the kernel's own
rule for this step and reported. The kernel's rules are the plain ones: in order of arrival, decodes before chunks,
youngest gives way, least recently used goes, no drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from octavo.core.config.schema import PolicyConfig
from octavo.core.plugins import resolve
from octavo.core.trace.catalogue import Event, PolicyRejected
from octavo.policies.contract import (
    Batching,
    Chunking,
    Eviction,
    Floats,
    Ints,
    Leaves,
    Preemption,
    Running,
    Selection,
    Speculation,
    Step,
    Waiting,
)

T = TypeVar("T")


class InvalidAnswer(ValueError):
    """A policy's answer breaks the contract; the message says how."""


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy of each group."""

    batching: Batching
    chunking: Chunking
    preemption: Preemption
    eviction: Eviction
    speculation: Speculation
    names: dict[str, str]
    """Group → name, for reports."""


def load_policies(config: PolicyConfig) -> Policies:
    """Make the configured policies; an unknown name is a `PluginError` that lists what is installed."""
    names = {
        group: getattr(config, group) for group in ("batching", "chunking", "preemption", "eviction", "speculation")
    }
    made = {group: resolve(f"octavo.{group}", name)(**config.options.get(group, {})) for group, name in names.items()}
    return Policies(**made, names=names)


def split_in_order(step: Step, remaining: Ints, decode_tokens: int) -> Ints:
    """The kernel's own way to divide the budget: one prefill after the other."""
    room = max(0, step.chunk_budget - decode_tokens)
    before: Ints = np.cumsum(remaining, dtype=np.int32) - remaining
    return np.minimum(np.maximum(room - before, 0), remaining)


class PolicyHost:
    """Asks the policies of the scheduler and of the KV-manager; its answers are always valid."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._events: list[Event] = []

    def drain_events(self) -> list[Event]:
        """What was rejected since the last call."""
        events, self._events = self._events, []
        return events

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        def ask() -> Selection:
            answer = self._policies.batching.select(step, waiting, running)
            admit = _indices(answer.admit, len(waiting), "admit")
            if answer.when_blocked not in ("stop", "skip"):
                raise InvalidAnswer(f"when_blocked is {answer.when_blocked!r}, not 'stop' or 'skip'")
            if answer.decode is not None and (
                answer.decode.dtype != np.bool_ or answer.decode.shape != (len(running),)
            ):
                raise InvalidAnswer(f"decode must be a mask of shape ({len(running)},)")
            return Selection(admit, answer.when_blocked, answer.decode)

        return self._ask("batching", ask, lambda: Selection(np.arange(len(waiting), dtype=np.int32)))

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        def ask() -> Ints:
            tokens = _integers(self._policies.chunking.split(step, remaining, decode_tokens), len(remaining), "tokens")
            if (tokens < 0).any() or (tokens > remaining).any():
                raise InvalidAnswer("each prefill's tokens must lie between 0 and what remains of it")
            if int(tokens.sum()) > max(0, step.chunk_budget - decode_tokens):
                raise InvalidAnswer(
                    f"{int(tokens.sum())} tokens and {decode_tokens} decodes exceed {step.chunk_budget}"
                )
            return tokens

        return self._ask("chunking", ask, lambda: split_in_order(step, remaining, decode_tokens))

    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        def ask() -> Ints:
            return _indices(self._policies.preemption.victims(step, need, candidates), len(candidates), "victims")

        youngest_first = np.argsort(-candidates.arrival_ns, kind="stable").astype(np.int32)
        chosen = self._ask("preemption", ask, lambda: youngest_first)
        rest = youngest_first[~np.isin(youngest_first, chosen)]  # goes on by itself if they are too few
        return np.concatenate([chosen, rest]).astype(np.int32)

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        def ask() -> Ints:
            drafts = _integers(self._policies.speculation.draft_lengths(step, running), len(running), "draft lengths")
            if (drafts < 0).any():
                raise InvalidAnswer("draft lengths must be at least 0")
            return drafts

        return self._ask("speculation", ask, lambda: np.zeros(len(running), dtype=np.int32))

    def rank(self, need: int, leaves: Leaves) -> Floats:
        """As `Eviction.rank`, so that the KV-manager can use the host in a policy's place."""

        def ask() -> Floats:
            scores = np.asarray(self._policies.eviction.rank(need, leaves), dtype=np.float64)
            if scores.shape != (len(leaves),) or not np.isfinite(scores).all():
                raise InvalidAnswer(f"scores must be {len(leaves)} finite numbers")
            return scores

        return self._ask("eviction", ask, lambda: leaves.last_used.astype(np.float64))

    def _ask(self, group: str, ask: Callable[[], T], otherwise: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - a policy is a stranger's code: whatever it raises is a bad answer
            why = str(error) if isinstance(error, InvalidAnswer) else f"{type(error).__name__}: {error}"
            self._events.append(PolicyRejected(group=group, policy=self._policies.names[group], why=why))
            return otherwise()


def _integers(values: Ints, count: int, what: str) -> Ints:
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise InvalidAnswer(f"{what} must be {count} integers, not {array.dtype} of shape {array.shape}")
    return np.asarray(array, dtype=np.int32)


def _indices(values: Ints, below: int, what: str) -> Ints:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    array = _integers(array, array.size, what)
    if array.min() < 0 or array.max() >= below or len(np.unique(array)) != len(array):
        raise InvalidAnswer(f"{what} must be distinct indices from 0 to {below - 1}")
    return array
