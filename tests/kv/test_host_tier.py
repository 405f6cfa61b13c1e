"""Blocks that are evicted go to host memory and come back as they were; what it holds never gets mixed up."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.kv.core import KvCore
from octavo.core.kv.host import HostTier
from octavo.core.messages import Kind, Match, Matched, Open, Sampling, col
from octavo.core.trace.catalogue import KvEvicted, StepBound
from tests.kv.test_kv_core import HOST, PROMPT, Kv

OTHER = list(range(50, 60))


def with_host(blocks: int, host_blocks: int) -> Kv:
    kv = Kv(blocks)
    kv.core = KvCore(
        total_blocks=blocks, block_size=4, slots=4, eviction=HOST, generation=1, host_blocks=host_blocks
    )  # fmt: skip
    return kv


def test_an_evicted_prefix_is_swapped_out_and_swapped_in_again() -> None:
    kv = with_host(blocks=4, host_blocks=8)
    kv.prefill(0, 1)
    kv.plan()
    first = kv.core.tables()[0][:2]
    kv.release(0, 1)
    opening = Open(1, 2, col(OTHER), 10, 0, 0, Sampling(), b"n")
    bind, _, events = kv.plan([(1, 2, Kind.CHUNK, 0, 10)], opens=[opening])  # takes all but one of the four
    (evicted,) = (event for event in events if isinstance(event, KvEvicted))
    assert (evicted.blocks, evicted.swapped_out) == (1, 1)
    assert list(zip(bind.copy_src.tolist(), bind.copy_dst.tolist(), strict=True)) == [(first[1], 4)]
    (out,) = kv.core.apply(0, Match(1, b"n", col([*PROMPT, 1]), len(PROMPT) + 1)).messages
    assert isinstance(out.message, Matched)
    assert (out.message.cached, out.message.swapped) == (8, 4)
    kv.release(1, 2)
    bind, ack, events = kv.plan([(2, 3, Kind.CHUNK, 8, 2)], opens=[Open(2, 3, col(PROMPT), 10, 8, 0, Sampling(), b"n")])
    assert not len(ack.rebase_end)
    (bound,) = (event for event in events if isinstance(event, StepBound))
    assert bound.swapped_in == 1
    table = kv.core.tables()[0]
    assert table[0] == first[0]
    assert (4, table[1]) in set(zip(bind.copy_src.tolist(), bind.copy_dst.tolist(), strict=True))
    assert kv.match([*OTHER, 1]) == 8  # its last block has gone the same way


def test_what_does_not_fit_the_pool_is_not_brought_back() -> None:
    kv = with_host(blocks=3, host_blocks=8)
    kv.prefill(0, 1)
    kv.plan()
    kv.release(0, 1)
    kv.prefill(1, 2, OTHER)
    kv.plan()
    assert kv.match([*PROMPT, 1]) == 8
    _, ack, _ = kv.plan(opens=[Open(2, 3, col(PROMPT), 10, 8, 0, Sampling(), b"n")])  # slot 1 holds all three
    assert ack.rebase_end.tolist() == [0]
    assert kv.match([*PROMPT, 1]) == 8


def test_what_one_open_pushes_out_another_of_the_same_step_brings_back() -> None:
    kv = with_host(blocks=4, host_blocks=8)
    memory = np.zeros(4 + 8, dtype=np.int64)
    wrote: dict[int, list[int]] = {}
    for number, ids in enumerate((PROMPT, OTHER, [1] * 12), 1):
        bind, _ = kv.prefill(0, number, ids)
        memory[bind.copy_dst] = memory[bind.copy_src]
        memory[bind.delta_block] = wrote[number] = [10 * number + i for i in range(len(bind.delta_block))]
        bind, _, _ = kv.plan(release_slot=col([0]), release_open_id=col([number]))
        assert not len(bind.copy_src)
    places = kv.core.pool.host
    assert places is not None
    assert len(places) == 3, "all of the first, the end of the second"
    opens = [Open(i, 7 + i, col([*ids, 1]), 11, 8, 0, Sampling(), b"n") for i, ids in enumerate((PROMPT, OTHER))]
    bind, ack, _ = kv.plan(opens=opens)
    assert not len(ack.rebase_end)
    assert set(bind.copy_src.tolist()) & set(bind.copy_dst.tolist()), "read before it is written"
    memory[bind.copy_dst] = memory[bind.copy_src]
    assert [memory[table].tolist() for table in kv.core.tables()] == [wrote[1][:2], wrote[2][:2]]


def test_nobody_is_pushed_out_of_its_part_of_host_memory() -> None:
    tier = HostTier(100, 8)
    for i in range(8):
        tier.keep(b"lent %d" % i, i, "flood")
    for i in range(3):
        tier.keep(b"small %d" % i, 10 + i, "small")
    for i in range(50):
        tier.keep(b"flood %d" % i, 20 + i % 8, "flood")
    assert all(b"small %d" % i in tier for i in range(3))
    for i in range(3, 9):
        tier.keep(b"small %d" % i, 80 + i, "small")
    kept = [i for i in range(9) if b"small %d" % i in tier]
    assert kept == [5, 6, 7, 8], "half of the places, and of its own the oldest go"
    assert [i for i in range(50) if b"flood %d" % i in tier] == [46, 47, 48, 49]
    assert not [wrong for wrong in tier.audit() if "copies" not in wrong]


def test_what_a_tenant_swaps_out_under_many_namespaces_counts_together() -> None:
    kv = with_host(blocks=4, host_blocks=4)

    def passes(ids: list[int], tenant: str, namespace: bytes) -> None:
        opening = Open(0, kv.steps + 1, col(ids), len(ids), 0, 0, Sampling(), namespace, tenant)
        kv.plan([(0, kv.steps + 1, Kind.CHUNK, 0, len(ids))], opens=[opening])
        kv.plan()
        kv.release(0, kv.steps - 1)

    passes(PROMPT, "small", b"n")
    for i in range(6):
        passes(OTHER, "flood", b"%d" % i)
    assert kv.match([*PROMPT, 1]) == 8


def test_without_places_nothing_is_swapped() -> None:
    kv = Kv(blocks=4)
    kv.prefill(0, 1)
    kv.plan()
    kv.release(0, 1)
    bind, _ = kv.prefill(1, 2, OTHER)
    assert not len(bind.copy_src)
    assert kv.match([*PROMPT, 1]) == 4


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a machine that others use is slow
@given(st.lists(st.tuples(st.sampled_from(["keep", "take", "discard", "bind"]), st.integers(0, 9)), max_size=80))
def test_what_comes_back_is_what_went(moves: list[tuple[str, int]]) -> None:
    """Memory is a number for each block: evicting block k takes key k's number away, swapping in must find it."""
    pool, places = 10, 4
    memory = np.arange(pool + places)
    tier = HostTier(pool, places)
    copies: list[tuple[int, int]] = []
    brought: dict[int, int] = {}

    def bind() -> None:
        moved = [*tier.settle(), *copies]
        memory[[target for _, target in moved]] = memory[[source for source, _ in moved]]
        for block, number in brought.items():
            assert memory[block] == number
        memory[:pool] = -1  # the step writes into every block that is free
        memory[list(brought)] = list(brought.values())
        for block in set(range(pool)) - set(brought):
            memory[block] = 100 + block
        copies.clear()
        brought.clear()
        assert not tier.audit()

    numbers: dict[bytes, int] = {}
    for move, block in moves:
        key = b"%d" % block
        match move:
            case "keep" if key not in tier:
                tier.keep(key, block, "abc"[block % 3])
                numbers[key] = int(memory[block])
            case "take" if key in tier and block not in brought:
                source = tier.take(key)
                copies.append((source, block))
                brought[block] = numbers[key]
            case "discard":
                tier.discard(key)
            case "bind":
                bind()
            case _:
                pass
    bind()
    assert len(tier) <= places
