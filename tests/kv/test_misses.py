"""Why a prefix is not found: each reason there is, and what it is told with."""

from __future__ import annotations

import pytest

from octavo.core.messages import Kind, Match, Matched, Open, Sampling, col
from tests.kv.test_kv_core import Kv, released_while_computed

PROMPT = list(range(10, 20))
"""Two blocks of four and a bit."""


def seen(kv: Kv, ids: list[int], namespace: bytes = b"n") -> None:
    """A request of these ids comes, is computed, and leaves."""
    slot, open_id = 0, kv.steps + 1
    opening = Open(slot, open_id, col(ids), len(ids), 0, 0, Sampling(), namespace)
    kv.plan([(slot, open_id, Kind.CHUNK, 0, len(ids))], opens=[opening])
    kv.plan()
    kv.release(slot, open_id)


def asked(kv: Kv, ids: list[int], namespace: bytes = b"n") -> tuple[int, str, int]:
    (out,) = kv.core.apply(0, Match(1, namespace, col(ids), len(ids))).messages
    assert isinstance(out.message, Matched)
    return out.message.cached, out.message.miss, out.message.at


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([*PROMPT[:8], 1], (8, "", 8)),
        ([10, 11, 12], (0, "short", 0)),
        ([1, *PROMPT], (0, "new", 0)),
        ([10, 11, 99, 13, 14], (0, "differs", 2)),
        ([*PROMPT[:4], 14, 15, 99, 17, 18], (4, "differs", 6)),
        ([*PROMPT[:4], 99, 15, 16, 17, 18], (4, "differs", 4)),
        ([*PROMPT[:8], 1, 2, 3, 4, 5], (8, "ends", 8)),
    ],
)
def test_a_miss_names_the_first_token_that_is_not_there(ids: list[int], told: tuple[int, str, int]) -> None:
    kv = Kv()
    seen(kv, PROMPT)
    assert asked(kv, ids) == told


def test_without_a_cache_that_is_the_reason() -> None:
    kv = Kv(caching=False)
    seen(kv, PROMPT)
    assert asked(kv, PROMPT) == (0, "disabled", 0)


def test_what_another_tenant_has_is_not_shared_but_said() -> None:
    kv = Kv()
    seen(kv, PROMPT)
    assert asked(kv, [*PROMPT[:4], *range(8)], b"other") == (0, "tenant", 4)
    assert asked(kv, [10, 11, 99, 99, 99], b"other") == (0, "new", 0)  # no whole block of it is anybody's
    seen(kv, [10, *range(50, 58)], b"other")
    assert asked(kv, [10, 11, 99, 99, 99], b"other") == (0, "differs", 1)  # what differs is of its own


def test_what_is_not_to_be_found_yet_is_nothing_to_differ_from() -> None:
    kv = Kv()
    released_while_computed(kv)
    assert asked(kv, PROMPT) == (4, "ends", 4)
    assert asked(kv, [*PROMPT[:6], 99, 99, 99]) == (4, "ends", 4)
    kv.plan(taken=2)
    assert asked(kv, PROMPT) == (8, "", 8)
    assert asked(kv, [*PROMPT[:6], 99, 99, 99]) == (4, "differs", 6)


def test_an_eviction_is_told_with_its_time() -> None:
    kv = Kv(blocks=4)
    seen(kv, PROMPT)
    seen(kv, list(range(100, 116)))
    evicting_step = kv.steps - 2
    (out,) = kv.core.apply(0, Match(1, b"n", col(PROMPT), len(PROMPT))).messages
    assert isinstance(out.message, Matched)
    assert (out.message.miss, out.message.evicted_ns) == ("evicted", evicting_step)  # the plans' time is their number
    seen(kv, PROMPT)
    assert asked(kv, PROMPT) == (8, "", 8)


def test_the_tree_is_counted_by_namespace() -> None:
    kv = Kv()
    seen(kv, PROMPT, b"aaaaaaaa")
    seen(kv, [*PROMPT, 1, 2], b"bbbbbbbb")
    assert kv.core.cached_by_namespace == {b"aaaa".hex(): 2, b"bbbb".hex(): 3}
