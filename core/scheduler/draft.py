"""The plan in the making, and what is kept of it until its result is here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.core.messages import EMPTY, Col, Fork, Open
from octavo.core.scheduler.sequence import Sequence
from octavo.core.scheduler.slots import SlotIds
from octavo.core.trace.catalogue import Event

NOBODY: SlotIds = np.zeros(0, dtype=np.intp)


@dataclass(slots=True)
class Commits:
    """Tokens to tell the KV-manager with the next plan, a row per residency and result."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """slot, open_id, kv_len, number of tokens"""
    tokens: list[int] = field(default_factory=list)

    def add(self, slot: int, open_id: int, kv_len: int, tokens: list[int]) -> None:
        self.rows.append((slot, open_id, kv_len, len(tokens)))
        self.tokens += tokens


@dataclass(slots=True)
class Outstanding:
    """A plan whose result is not here yet. Columns have a value per item."""

    step: int
    planned_ns: int
    slot: Col
    open_id: Col
    sequences: list[Sequence]
    yields: Col
    """Tokens that the item surely yields, unless its sequence ends before: its rounds if it samples, else 0."""
    most: Col
    """Most tokens it may yield."""
    chunked: list[Sequence]
    """Those that had a chunk of their prompt computed."""


@dataclass(slots=True)
class Draft:
    """The plan in the making."""

    step: int
    now_ns: int
    credit: int
    budget: int
    taken: int
    """The last step whose result is here."""
    debit: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decodes: SlotIds = field(default_factory=lambda: NOBODY)
    most: Col = field(default_factory=lambda: EMPTY)
    """Most tokens that each decode may yield: its guesses and one, or one in each round."""
    rounds: int = 1
    capacity: Col = field(default_factory=lambda: EMPTY)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    refused: dict[Sequence, tuple[str, int, int]] = field(default_factory=dict)
    """Who was not admitted: for want of which resource, how much it needs, how much there is."""

    def spend(self, blocks: int, tokens: int) -> None:
        self.debit += blocks
        self.credit -= blocks
        self.budget -= tokens


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // block_size)
