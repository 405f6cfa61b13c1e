"""Emptying the prefix tree: what goes, what stays, and that nobody who runs loses anything."""

from __future__ import annotations

import random

from octavo.core.messages import Flush, Fork, Kind, Open, Sampling, col
from octavo.core.trace.catalogue import KvFlushed
from tests.kv.test_host_tier import with_host
from tests.kv.test_kv_core import PROMPT, Kv

A, B = b"a" * 16, b"b" * 16


def flush(kv: Kv, tenant: str | None = None, ids: list[int] | None = None) -> tuple[int, int]:
    """Blocks freed, and in use."""
    (event,) = kv.core.apply(0, Flush(tenant, col(ids or []))).events
    assert isinstance(event, KvFlushed)
    assert not kv.core.pool.audit(kv.core.tables())
    return event.freed, event.in_use


def cache(kv: Kv, ids: list[int], namespace: bytes = A, tenant: str = "ada", slot: int = 0) -> None:
    """Have it computed, and forgotten by everybody but the tree."""
    opening = Open(slot, kv.steps + 100, col(ids), len(ids), 0, 0, Sampling(), namespace, tenant)
    kv.plan([(slot, opening.open_id, Kind.CHUNK, 0, len(ids))], opens=[opening])
    kv.release(slot, opening.open_id)
    assert kv.match([*ids, 1], namespace) == len(ids) // 4 * 4


def test_all_of_it() -> None:
    kv = Kv()
    cache(kv, PROMPT)
    cache(kv, PROMPT, B, "bob")
    assert flush(kv) == (4, 0)
    assert (kv.core.pool.free, kv.core.pool.cached, kv.core.by_tenant()) == (16, 0, [])
    assert kv.match([*PROMPT, 1], A) == kv.match([*PROMPT, 1], B) == 0
    assert flush(kv) == (0, 0)


def test_of_one_tenant() -> None:
    kv = Kv()
    cache(kv, PROMPT)
    cache(kv, PROMPT, B, "bob")
    assert kv.core.by_tenant() == [("ada", 2, 0), ("bob", 2, 0)]
    assert flush(kv, "ada") == (2, 0)
    assert (kv.match([*PROMPT, 1], A), kv.match([*PROMPT, 1], B)) == (0, 8)
    assert flush(kv, "nobody") == (0, 0)
    assert kv.core.by_tenant() == [("bob", 2, 0)]


def test_of_a_prefix_what_lies_behind_it_and_what_nothing_else_hangs_on() -> None:
    kv = Kv(32)
    head = list(range(8))
    one, two = [*head, 1, 1, 1, 1, 2, 2, 2, 2], [*head, 3, 3, 3, 3]
    for ids in (one, two, [9] * 8):
        cache(kv, ids)
    assert flush(kv, ids=[*head, 1, 1]) == (2, 0), "a prefix may end within a block"
    assert (kv.match([*one, 1], A), kv.match([*two, 1], A)) == (8, 12)
    assert flush(kv, ids=[*head, 3, 3, 3, 3]) == (3, 0)
    assert kv.match([*two, 1], A) == 0
    assert kv.match([9] * 9, A) == 8
    assert flush(kv, ids=[9] * 30) == (2, 0), "longer than what is cached of it"


def test_who_runs_keeps_its_blocks_and_they_are_free_at_its_end() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.plan()
    table = list(kv.core.tables()[0])
    assert flush(kv) == (0, 2)
    assert kv.core.tables() == [table]
    assert kv.match([*PROMPT, 1]) == 0
    kv.plan(
        [(0, 1, Kind.DECODE, 13, 1)],
        commit_slot=col([0]),
        commit_open_id=col([1]),
        commit_kv_len=col([12]),
        commit_n=col([3]),
        commit_tokens=col([5, 6, 7]),
    )
    assert kv.core.pool.cached == 0, "nothing of it is cached any more"
    kv.prefill(1, 2)  # another one with the same prompt computes it again, in blocks of its own
    kv.plan()
    assert kv.match([*PROMPT, 1]) == 8
    assert not set(kv.core.tables()[1]) & set(table)
    assert kv.release(0, 1).free == 16 - 3


def test_a_fork_of_who_was_flushed_is_as_cut_off() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.plan()
    assert flush(kv) == (0, 2)
    kv.plan(forks=[Fork(1, 2, 0, 1, 10, col([1, 2, 3, 4, 5]), 10, 1, Sampling())])
    kv.plan([(1, 2, Kind.CHUNK, 10, 5)])
    kv.plan()
    assert kv.core.pool.cached == 0
    kv.release(0, 1)
    assert kv.release(1, 2).free == 16


def test_what_is_not_in_the_tree_yet_does_not_get_there() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    assert flush(kv, ids=PROMPT[:2]) == (0, 0)
    kv.plan()
    assert kv.core.pool.cached == 0
    kv.prefill(1, 2, [1] * 9)
    kv.prefill(2, 3, [2] * 9)
    assert flush(kv, ids=[2]) == (0, 0)
    kv.plan()
    assert (kv.match([1] * 9), kv.match([2] * 9)) == (8, 0), "only what was meant"


def test_host_memory_is_emptied_too() -> None:
    kv = with_host(blocks=4, host_blocks=8)
    cache(kv, PROMPT)
    cache(kv, [1] * 12, B, "bob")
    assert kv.match([*PROMPT, 1], A) == 8, "it can be swapped in"
    (event,) = kv.core.apply(0, Flush("nobody", col())).events
    assert isinstance(event, KvFlushed)
    assert (event.freed, event.in_use, event.from_host) == (0, 0, 1)
    assert kv.match([*PROMPT, 1], A) == 4
    assert not kv.core.pool.audit(kv.core.tables())


def test_a_hint_from_before_is_answered_with_what_is_there() -> None:
    kv = Kv()
    cache(kv, PROMPT, b"n", "")
    flush(kv)
    _, ack = kv.prefill(0, 7, cached=8)
    assert next(zip(ack.rebase_slot.tolist(), ack.rebase_end.tolist(), strict=True)) == (0, 0)


def test_whatever_is_cached_a_flush_of_a_prefix_leaves_nothing_behind_it() -> None:
    """Of random trees: what begins with the prefix is not found any more beyond what others need of it."""
    for seed in range(60):
        r = random.Random(seed)
        kv = Kv(200)
        asked = [[r.randint(1, 2) for _ in range(r.choice([4, 8, 9, 12]))] for _ in range(8)]
        for ids in asked:
            cache(kv, ids, *r.choice([(A, "ada"), (B, "bob")]))
        prefix = [r.randint(1, 2) for _ in range(r.randint(0, 6))]
        before, held = kv.core.pool.cached, kv.core.pool.available
        freed, in_use = flush(kv, "ada", prefix)
        assert (in_use, before - freed, held) == (0, kv.core.pool.cached, kv.core.pool.available)
        for ids in asked:
            if ids[: len(prefix)] == prefix:
                assert kv.match([*ids, 1], A) <= max(0, len(prefix) - 1)
