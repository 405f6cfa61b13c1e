"""Text is found in the tree by who computes it as it was computed: read as a prompt, or generated."""

from __future__ import annotations

from typing import Any

from octavo.core.kv.core import KvCore
from octavo.core.messages import Flush, Fork, Kind, Match, Matched, Open, Sampling, col
from octavo.core.trace.catalogue import KvFlushed
from tests.kv.test_kv_core import HOST, Kv

PROMPT, ANSWER = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]


def answered(*, apart: bool) -> Kv:
    """A conversation's first turn, computed and gone."""
    kv = Kv()
    kv.core = KvCore(total_blocks=16, block_size=4, slots=4, eviction=HOST, generation=1, prompts_apart=apart)
    kv.prefill(0, 1, PROMPT)
    told = {"commit_slot": [0], "commit_open_id": [1], "commit_kv_len": [12], "commit_n": [6], "commit_tokens": ANSWER}
    columns: dict[str, Any] = {name: col(value) for name, value in told.items()}
    kv.plan([(0, 1, Kind.DECODE, 13, 1)])
    kv.plan(**columns)
    kv.release(0, 1)
    kv.plan()
    return kv


def asked(kv: Kv, prompt: list[int], known: list[int]) -> tuple[int, str, int]:
    (out,) = kv.core.apply(0, Match(1, b"n", col([*prompt, *known, 99]), len(prompt) + (not known))).messages
    assert isinstance(out.message, Matched)
    return out.message.cached, out.message.miss, out.message.at


def test_where_both_are_alike_an_answer_serves_the_next_prompt() -> None:
    kv = answered(apart=False)
    assert asked(kv, PROMPT + ANSWER, []) == (12, "", 12)
    assert asked(kv, PROMPT, ANSWER) == (12, "", 12)


def test_apart_an_answer_serves_whoever_goes_on_with_it_and_no_prompt() -> None:
    kv = answered(apart=True)
    assert asked(kv, PROMPT, ANSWER) == (12, "", 12)
    assert asked(kv, PROMPT + ANSWER, []) == (4, "generated", 6)
    assert asked(kv, PROMPT[:5], [6, *ANSWER]) == (4, "generated", 5)
    assert asked(kv, [*PROMPT, 99, 8, 9, 10], []) == (4, "differs", 6)


def test_both_can_be_there_and_a_flush_takes_both() -> None:
    kv = answered(apart=True)
    opening = Open(0, 2, col(PROMPT + ANSWER), 12, 4, 0, Sampling(), b"n")
    kv.plan([(0, 2, Kind.CHUNK, 4, 8)], opens=[opening])
    kv.plan()
    assert asked(kv, PROMPT + ANSWER, []) == (12, "", 12)
    assert asked(kv, PROMPT, ANSWER) == (12, "", 12)
    (flushed,) = kv.core.apply(0, Flush(None, col(PROMPT + ANSWER[:1]))).events
    assert isinstance(flushed, KvFlushed)
    assert (flushed.freed, flushed.in_use) == (2, 3)
    assert asked(kv, PROMPT + ANSWER, [])[0] == 0
    assert asked(kv, PROMPT, ANSWER)[0] == 0
    kv.plan()
    assert asked(kv, PROMPT + ANSWER, [])[0] == 0  # what is resident and was flushed does not enter again


def test_what_a_fork_has_said_before_is_generated() -> None:
    kv = answered(apart=True)
    kv.prefill(0, 2, PROMPT, cached=4)
    kv.plan()
    fork = Fork(1, 3, 0, 2, 6, col(ANSWER[:2]), 6, 1, Sampling())
    kv.plan([(1, 3, Kind.CHUNK, 6, 2)], forks=[fork])
    kv.plan()
    assert asked(kv, PROMPT, ANSWER[:2]) == (8, "", 8)
    assert asked(kv, [*PROMPT, *ANSWER[:2]], [])[0] == 4
