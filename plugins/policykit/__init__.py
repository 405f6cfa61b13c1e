"""Checks that an author of a policy runs as one pytest line each.

    from octavo.plugins.policykit import check_batching

    def test_mine() -> None:
        check_batching(Mine)  # or lambda: Mine(Mine.Options(size=4))

Each check makes the policy by the factory, shows it ordinary and pathological views, compares its answers with the
contract, runs it in a small engine with the production cores, and raises `PolicyFault` (an AssertionError) that says
what was wrong, in which view, and what to do.
"""

from octavo.plugins.policykit.checks import (
    check_batching,
    check_chunking,
    check_eviction,
    check_preemption,
    check_speculation,
)
from octavo.plugins.policykit.fault import PolicyFault

__all__ = [
    "PolicyFault",
    "check_batching",
    "check_chunking",
    "check_eviction",
    "check_preemption",
    "check_speculation",
]
