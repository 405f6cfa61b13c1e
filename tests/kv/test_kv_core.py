"""The KV-manager alone: what it binds, what it refuses, what it shares and what it gives up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.config.schema import PolicyConfig
from octavo.core.kv.core import REFUSED, KvCore
from octavo.core.kv.host import HostTier
from octavo.core.kv.pool import NO_BLOCK, BlockPool, OutOfBlocks, chain_key, held_key
from octavo.core.machine import Outputs
from octavo.core.messages import (
    EMPTY,
    Flush,
    Fork,
    Kind,
    KvState,
    Match,
    Matched,
    Open,
    PeerDown,
    PeerUp,
    Role,
    Sampling,
    StepAck,
    StepBind,
    StepPlan,
    col,
)
from octavo.core.policy import PolicyHost, load_policies
from octavo.core.trace.catalogue import KvLeak, KvOverdraft

HOST = PolicyHost(load_policies(PolicyConfig()))
PROMPT = list(range(10, 20))


class Kv:
    """A KV-manager with blocks of four tokens, and plans for it in short."""

    def __init__(self, blocks: int = 16, *, caching: bool = True) -> None:
        self.core = KvCore(total_blocks=blocks, block_size=4, slots=4, eviction=HOST, generation=1, caching=caching)
        self.steps = 0

    def plan(
        self, items: Sequence[tuple[int, int, Kind, int, int]] = (), **more: Any
    ) -> tuple[StepBind, StepAck, list[Any]]:
        """Items are (slot, open_id, kind, start or capacity, n)."""
        outputs = self.answers(items, **more)
        (bind, ack) = (out.message for out in outputs.messages)
        assert isinstance(bind, StepBind)
        assert isinstance(ack, StepAck)
        assert not self.core.pool.audit(self.core.tables())
        return bind, ack, outputs.events

    def answers(self, items: Sequence[tuple[int, int, Kind, int, int]] = (), **more: Any) -> Outputs:
        self.steps += 1
        columns = [col([item[i] for item in items]) for i in range(5)]
        empty = dict.fromkeys(
            [
                "commit_slot",
                "commit_open_id",
                "commit_kv_len",
                "commit_n",
                "commit_tokens",
                "release_slot",
                "release_open_id",
            ],
            EMPTY,
        )
        fields = {**empty, "opens": [], "forks": [], "taken": self.steps - 1, "failed": [], **more}
        plan = StepPlan(
            scheduler_gen=1, step=self.steps, now_ns=self.steps, slot=columns[0], open_id=columns[1], kind=columns[2],
            start_or_cap=columns[3], n=columns[4], **fields,
        )  # fmt: skip
        return self.core.apply(self.steps, plan)

    def prefill(self, slot: int, open_id: int, ids: list[int] = PROMPT, cached: int = 0) -> tuple[StepBind, StepAck]:
        """Open and compute all of it in one step."""
        opening = Open(slot, open_id, col(ids), len(ids), cached, 0, Sampling(), b"n")
        bind, ack, _ = self.plan([(slot, open_id, Kind.CHUNK, cached, len(ids) - cached)], opens=[opening])
        return bind, ack

    def release(self, slot: int, open_id: int) -> StepAck:
        return self.plan(release_slot=col([slot]), release_open_id=col([open_id]))[1]

    def match(self, ids: list[int], namespace: bytes = b"n") -> int:
        (out,) = self.core.apply(0, Match(1, namespace, col(ids), len(ids))).messages
        assert isinstance(out.message, Matched)
        return out.message.cached


def rebases(ack: StepAck) -> list[tuple[int, int, int]]:
    return list(zip(ack.rebase_slot.tolist(), ack.rebase_open_id.tolist(), ack.rebase_end.tolist(), strict=True))


def test_full_blocks_can_be_matched_from_the_next_step_on() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    assert kv.match([*PROMPT, 1]) == 0  # the step that computes them is not behind us yet
    kv.plan()
    assert kv.match([*PROMPT, 1]) == 8
    assert kv.match(PROMPT[:8]) == 4  # at least one token is left to compute
    assert kv.match([*PROMPT, 1], namespace=b"other") == 0


def test_an_open_shares_what_is_cached_and_says_when_it_is_less_than_hoped() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.plan()
    bind, ack = kv.prefill(1, 2, cached=8)
    assert bind.opened_blocks.tolist() == kv.core.tables()[0][:2]
    assert rebases(ack) == []
    bind, ack = kv.prefill(2, 3, [1, 2, 3, 4, 5, 6, 7, 8, 9], cached=8)
    assert rebases(ack) == [(2, 3, 0), (2, 3, 0)]
    assert bind.skipped.tolist() == [0]


def test_two_that_compute_the_same_block_end_up_with_one() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.prefill(1, 2)
    bind, _, _ = kv.plan()
    first, second = kv.core.tables()
    assert second[:2] == first[:2]
    assert second[2] != first[2]  # the unfinished one is each one's own
    assert list(zip(bind.delta_slot.tolist(), bind.delta_index.tolist(), strict=True)) == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    "item",
    [
        (0, 99, Kind.DECODE, 11, 1),
        (3, 1, Kind.DECODE, 11, 1),
        (-1, 1, Kind.DECODE, 11, 1),
        (77, 1, Kind.DECODE, 11, 1),
    ],
    ids=["another residency", "an empty slot", "a negative slot", "no such slot"],
)
def test_an_item_for_nobody_is_refused_and_hurts_nobody(item: tuple[int, int, Kind, int, int]) -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.prefill(1, 2)
    bind, ack, _ = kv.plan([(1, 2, Kind.DECODE, 13, 1), item])
    assert bind.skipped.tolist() == [1]
    assert rebases(ack) == [(item[0], item[1], REFUSED)] or rebases(ack)[0][2] == REFUSED
    assert bind.delta_slot.tolist()[-1] == 1


def test_a_slot_is_served_once_a_step_and_no_item_is_empty() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    bind, _, _ = kv.plan([(0, 1, Kind.DECODE, 11, 1), (0, 1, Kind.DECODE, 12, 1)])
    assert bind.skipped.tolist() == [1]
    bind, _, _ = kv.plan([(0, 1, Kind.DECODE, 12, 0)])
    assert bind.skipped.tolist() == [0]


def test_a_decode_may_not_overtake_the_prefill_it_builds_on() -> None:
    kv = Kv()
    opening = Open(0, 1, col(PROMPT), 10, 0, 0, Sampling(), b"n")
    bind, ack, _ = kv.plan([(0, 1, Kind.CHUNK, 0, 5)], opens=[opening])
    assert not len(bind.skipped)
    bind, ack, _ = kv.plan([(0, 1, Kind.DECODE, 11, 1)])
    assert rebases(ack) == [(0, 1, 5)]
    kv.plan([(0, 1, Kind.CHUNK, 5, 4)])
    _, ack, _ = kv.plan([(0, 1, Kind.DECODE, 11, 1)])  # there are blocks enough for it, but not all before it
    assert rebases(ack) == [(0, 1, 9)]


def test_a_plan_beyond_its_credit_is_reported_and_bound_as_far_as_it_goes() -> None:
    kv = Kv(blocks=4)
    openings = [Open(s, s + 1, col(PROMPT), 10, 0, 0, Sampling(), bytes([s])) for s in (0, 1)]
    bind, ack, events = kv.plan([(s, s + 1, Kind.CHUNK, 0, 10) for s in (0, 1)], opens=openings)
    assert bind.skipped.tolist() == [1]
    assert rebases(ack) == [(1, 2, 0)]
    assert [e.need for e in events if isinstance(e, KvOverdraft)] == [6]


@pytest.mark.parametrize(("n", "shared", "copied"), [(8, 2, 0), (9, 2, 1), (3, 0, 1)])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(n: int, shared: int, copied: int) -> None:
    kv = Kv()
    kv.prefill(0, 1)
    fork = Fork(1, 2, 0, 1, n, col(PROMPT[n:]), 10, 1, Sampling())
    bind, _, _ = kv.plan([(1, 2, Kind.CHUNK, n, 10 - n)], forks=[fork])
    parent, child = kv.core.tables()
    assert child[:shared] == parent[:shared]
    assert not set(child[shared:]) & set(parent)
    assert bind.copy_src.tolist() == parent[shared : shared + copied]
    assert bind.copy_dst.tolist() == child[shared : shared + copied]


def test_a_fork_without_its_parent_or_beyond_it_is_refused() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    for parent_open, n in ((9, 8), (1, 11)):
        fork = Fork(1, 2, 0, parent_open, n, col([5]), 10, 1, Sampling())
        _, ack, _ = kv.plan(forks=[fork])
        assert rebases(ack) == [(1, 2, REFUSED)]


def test_what_is_used_least_recently_goes_first_and_leaves_before_their_parents() -> None:
    kv = Kv(blocks=6)
    kv.prefill(0, 1, [*range(10, 18), 1])
    kv.release(0, 1)
    kv.prefill(0, 2, [*range(20, 28), 1])
    kv.release(0, 2)
    assert kv.match([*range(10, 18), 1]) == 8
    kv.prefill(0, 3, [*range(30, 41)])  # needs three: two are free, one goes
    assert kv.match([*range(10, 18), 1]) == 4
    assert kv.match([*range(20, 28), 1]) == 8


def kept_or_not(pool: BlockPool, keep: dict[int, int], *, tenants: int = 1) -> list[int]:
    """Fills the pool with root blocks, in order of use and by turns of the tenants, of which some are to be kept for so
    long; then evicts all, one by one, at time 100. The blocks in the order in which they went."""
    for i in range(pool.total):
        block = pool.allocate()
        pool.insert(block, bytes([i]), NO_BLOCK, b"", i % tenants)
        pool.touch(block, i, keep_ns=keep.get(i, 0))
        pool.release(block)
    pool.now_ns = 100
    went = []
    for _ in range(pool.total):
        pool.reserve(1)
        went.append(pool.allocate())
    return went


def test_what_is_to_be_kept_goes_last_and_only_for_its_time() -> None:
    assert kept_or_not(BlockPool(8, HOST), {1: 1000, 4: 1000, 5: 50}) == [0, 2, 3, 5, 6, 7, 1, 4]


def test_nobody_keeps_more_than_a_part_of_half_of_the_pool() -> None:
    everything = dict.fromkeys(range(16), 1000)
    assert kept_or_not(BlockPool(16, HOST), everything)[:8] == list(range(8)), "the latest half is kept"
    greedy = dict.fromkeys(range(0, 16, 2), 1000) | {1: 1000}
    went = kept_or_not(BlockPool(16, HOST), greedy, tenants=2)
    assert went[-5:] == [1, 8, 10, 12, 14], "a quarter for the one, the single block of the other"


def test_a_lost_scheduler_leaves_the_tree_and_no_table() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.plan()
    kv.core.apply(0, PeerDown(Role.SCHEDULER))
    assert kv.core.tables() == []
    (out,) = kv.core.apply(0, PeerUp(Role.SCHEDULER, 2)).messages
    assert out.message.__class__ is KvState
    assert kv.core.pool.available == 16
    assert kv.match([*PROMPT, 1]) == 8


def test_without_caching_nothing_is_ever_shared() -> None:
    kv = Kv(caching=False)
    kv.prefill(0, 1)
    kv.prefill(1, 2)
    kv.plan()
    first, second = kv.core.tables()
    assert not set(first) & set(second)
    assert kv.match([*PROMPT, 1]) == 0


def test_what_is_computed_is_shared_only_once_its_result_is_there() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.plan(taken=0)
    assert kv.match([*PROMPT, 1]) == 0
    kv.plan(taken=1)
    assert kv.match([*PROMPT, 1]) == len(PROMPT) // 4 * 4


def test_a_duplicate_that_a_fork_shares_stays_where_it_is() -> None:
    """Another block in one of the two tables would cost one that no plan has paid for, and leave the other beside the
    tree."""
    kv = Kv()
    kv.prefill(0, 1)
    kv.release(0, 1)
    opening = Open(0, 2, col(PROMPT), len(PROMPT), 0, 0, Sampling(), b"n")
    kv.plan([(0, 2, Kind.CHUNK, 0, len(PROMPT))], opens=[opening])
    kv.plan(forks=[Fork(1, 3, 0, 2, 8, col(PROMPT[8:]), len(PROMPT), 1, Sampling())], taken=2)
    before = kv.core.pool.available
    kv.plan()
    assert kv.core.pool.available == before
    mine, theirs = kv.core.tables()
    assert mine[:2] == theirs[:2]
    kv.release(1, 3)
    kv.release(0, 2)
    kv.plan()
    assert kv.core.pool.available == kv.core.pool.total


@pytest.mark.parametrize("released", [True, False])
def test_what_has_failed_never_enters_the_tree(released: bool) -> None:
    kv = Kv()
    kv.prefill(1, 7, PROMPT[:5])
    opening = Open(0, 1, col(PROMPT), len(PROMPT), 4, 0, Sampling(), b"n")
    kv.plan([(0, 1, Kind.CHUNK, 4, 4)], opens=[opening])
    kv.plan([(0, 1, Kind.CHUNK, 8, 2)], taken=1)
    assert kv.match(PROMPT) == 4
    release: dict[str, Any] = {"release_slot": col([0]), "release_open_id": col([1])} if released else {}
    kv.plan(taken=2, failed=[1], **release)
    kv.plan(taken=3, failed=[1])
    kv.plan()
    assert kv.match(PROMPT) == 4, "what others have computed stays"
    assert kv.core.pool.cached == 1


def released_while_computed(kv: Kv, ids: list[int] = PROMPT) -> None:
    """Two chunks of open_id 1, the second one under way, then gone."""
    opening = Open(0, 1, col(ids), len(ids), 0, 0, Sampling(), b"n")
    kv.plan([(0, 1, Kind.CHUNK, 0, 4)], opens=[opening])
    kv.plan([(0, 1, Kind.CHUNK, 4, len(ids) - 4)], taken=0)
    kv.plan(taken=1, release_slot=col([0]), release_open_id=col([1]))


def test_what_was_under_way_at_a_release_is_found_once_its_step_has_gone_well() -> None:
    kv = Kv()
    released_while_computed(kv)
    assert kv.match([*PROMPT, 1]) == 4
    assert kv.core.pool.available == kv.core.pool.total, "the scheduler may count on it at once"
    kv.plan(taken=2)
    assert kv.match([*PROMPT, 1]) == 8
    assert kv.core.pool.cached == 2


def test_what_was_under_way_at_a_release_and_failed_is_never_found() -> None:
    kv = Kv()
    released_while_computed(kv)
    kv.plan(taken=2, failed=[1])
    assert kv.match([*PROMPT, 1]) == 4
    assert kv.core.pool.cached == 1
    assert kv.core.pool.free == kv.core.pool.total - 1


def test_all_that_is_behind_a_block_that_somebody_else_computed_first_is_given_up() -> None:
    kv = Kv()
    ids = [*PROMPT, *range(90, 96)]  # four blocks
    opens = [Open(slot, slot, col(ids), len(ids), 0, 0, Sampling(), b"n") for slot in (1, 2)]
    kv.plan([(1, 1, Kind.CHUNK, 0, 4)], opens=opens)
    kv.plan([(2, 2, Kind.CHUNK, 0, 8)], taken=0)
    kv.plan([(2, 2, Kind.CHUNK, 8, 8)], taken=0, release_slot=col([2]), release_open_id=col([2]))
    assert kv.core.pool.cached == 2
    kv.plan(taken=1)
    assert (kv.match([*ids, 1]), kv.core.pool.cached) == (4, 3)
    kv.plan(taken=2)
    assert (kv.match([*ids, 1]), kv.core.pool.cached) == (4, 1)
    kv.plan(taken=3)
    kv.release(1, 1)
    assert kv.core.pool.free == kv.core.pool.total - 1


def test_a_scheduler_that_dies_leaves_nothing_of_what_was_released_under_way() -> None:
    kv = Kv()
    released_while_computed(kv)
    kv.core.apply(0, PeerDown(Role.SCHEDULER))
    kv.core.apply(0, PeerUp(Role.SCHEDULER, 2))
    assert kv.core.pool.cached == 1
    assert not kv.core.pool.audit(kv.core.tables())


def test_a_block_that_waits_for_its_step_can_be_evicted_and_is_then_lost() -> None:
    kv = Kv(blocks=4)
    released_while_computed(kv)
    kv.prefill(1, 2, list(range(50, 66)))  # all of the pool
    kv.plan(taken=2)
    assert kv.match([*PROMPT, 1]) == 0
    assert not kv.core.pool.audit(kv.core.tables())


@pytest.mark.parametrize("first", ["flushed", "released"])
def test_what_is_flushed_under_way_is_never_found(first: str) -> None:
    kv = Kv()
    opening = Open(0, 1, col(PROMPT), len(PROMPT), 0, 0, Sampling(), b"n")
    kv.plan([(0, 1, Kind.CHUNK, 0, 4)], opens=[opening])
    kv.plan([(0, 1, Kind.CHUNK, 4, 6)], taken=0)
    if first == "flushed":
        kv.core.apply(0, Flush(None, EMPTY))
    kv.plan(taken=1, release_slot=col([0]), release_open_id=col([1]))
    if first == "released":
        kv.core.apply(0, Flush(None, EMPTY))
    assert kv.core.pool.free == kv.core.pool.total
    kv.plan(taken=2)
    assert (kv.match([*PROMPT, 1]), kv.core.pool.cached) == (0, 0)


def test_a_block_that_waits_for_its_step_does_not_go_to_host_memory() -> None:
    pool = BlockPool(1, HOST, HostTier(1, 1))
    key = chain_key(b"n", b"ids.")
    pool.insert(pool.allocate(), held_key(key, 7), NO_BLOCK, b"ids.")
    pool.release(0)
    assert pool.allocate() == 0
    assert pool.host is not None
    assert (len(pool.host), pool.why_missing(key, NO_BLOCK, b"ids.", 0).reason) == (0, "new")


def test_a_scheduler_that_dies_with_the_news_of_a_step_leaves_nothing_of_it_in_the_tree() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.plan([(0, 1, Kind.DECODE, len(PROMPT) + 1, 1)], taken=0)
    kv.core.apply(0, PeerDown(Role.SCHEDULER))
    kv.core.apply(0, PeerUp(Role.SCHEDULER, 2))
    assert kv.core.pool.free == kv.core.pool.total
    kv.steps = 0
    again = Open(0, 1, col(PROMPT), len(PROMPT), 0, 0, Sampling(), b"n")
    kv.plan([(0, 1, Kind.CHUNK, 0, 4)], opens=[again])
    kv.plan(taken=1)
    assert kv.match(PROMPT) == 4, "only what its successor knows of"


def test_a_leak_is_reported_and_repaired_when_idle() -> None:
    kv = Kv()
    kv.prefill(0, 1)
    kv.core.pool._free.pop()
    plan = StepPlan(
        1, 9, 9, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, col([0]), col([1]), [], [], EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, 8, []
    )
    outputs = kv.core.apply(9, plan)
    (leak,) = (e for e in outputs.events if isinstance(e, KvLeak))
    assert leak.total == 16
    assert leak.free + leak.cached == 15
    assert "block" in leak.dump
    assert kv.core.pool.available == 16
    (ack,) = (out.message for out in outputs.messages if isinstance(out.message, StepAck))
    assert ack.free + ack.evictable == 16, "the scheduler is told at once"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8))
def test_the_pool_balances_whatever_is_taken_and_given_back(actions: list[int], total: int) -> None:
    pool = BlockPool(total, HOST)
    held: list[int] = []
    for i, action in enumerate(actions):
        if action < 5:
            try:
                block = pool.allocate()
            except OutOfBlocks:
                assert pool.available == 0
                continue
            if action < 3:
                pool.insert(block, chain_key(b"", np.int32(i).tobytes()), NO_BLOCK, np.int32(i).tobytes())
            held.append(block)
        elif held:
            pool.release(held.pop(action % len(held)))
        assert not pool.audit([held])
        assert pool.free + pool.evictable == pool.available == total - len(set(held))


def test_a_step_that_takes_nothing_is_acked_only_if_there_is_something_to_say() -> None:
    kv = Kv()
    kv.prefill(0, 1)

    def answered(capacity: int, open_id: int = 1, *, needs_ack: bool = False) -> list[str]:
        outputs = kv.answers([(0, open_id, Kind.DECODE, capacity, 1)], needs_ack=needs_ack)
        return [type(out.message).__name__ for out in outputs.messages]

    end = len(PROMPT) + 1
    assert answered(end, needs_ack=True) == ["StepBind", "StepAck"]
    assert answered(end) == ["StepBind"]
    assert answered(end + 4) == ["StepBind", "StepAck"]  # it takes a block
    assert answered(end + 4) == ["StepBind"]
    assert answered(end + 4, open_id=7) == ["StepBind", "StepAck"]  # a rebase: nobody is there
