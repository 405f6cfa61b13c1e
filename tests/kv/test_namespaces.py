"""A namespace for every request: their numbers are used again, and nobody finds what another one's had."""

from __future__ import annotations

from octavo.core.kv.namespaces import FEWEST, Namespaces
from tests.kv.test_kv_core import Kv
from tests.kv.test_misses import asked, seen

PROMPT = list(range(10, 20))
COUNT = 500


def test_numbers_are_used_again_once_their_namespace_has_nothing() -> None:
    kv = Kv()
    total = kv.core.pool.total
    for i in range(COUNT):
        namespace = i.to_bytes(4, "big")
        seen(kv, PROMPT, namespace)
        assert asked(kv, PROMPT, namespace) == (8, "", 8)
        assert asked(kv, PROMPT, b"never asked")[0] == 0
    most = max(FEWEST, 2 * (total // 2 + 1))
    assert len(kv.core.pool.tenants) <= most < COUNT
    assert sum(kv.core.pool.tenant_blocks) == kv.core.pool.cached
    assert not kv.core.pool.audit(kv.core.tables())


def test_a_number_given_out_again_is_the_new_tenants() -> None:
    namespaces = Namespaces()
    first = [namespaces.take(i.to_bytes(2, "big"), f"t{i}", set) for i in range(FEWEST)]
    again = namespaces.take(b"new", "ada", lambda: {first[0], first[5]})
    assert again in first
    assert again not in {first[0], first[5]}
    assert namespaces.tenants[again] == "ada"
    assert namespaces.tenants[first[5]] == "t5"
    assert namespaces.get((1).to_bytes(2, "big")) == -1
    assert len(namespaces.tenants) == FEWEST
    assert namespaces[(5).to_bytes(2, "big")] == first[5]
