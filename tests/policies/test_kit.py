"""The authors' kit passes every built-in policy and tells the author of a bad one what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.core.plugins import installed
from octavo.core.policy.load import METHODS, load_policy
from octavo.plugins import policykit
from octavo.plugins.policykit import PolicyFault, asking
from tests.policies.bad import BAD

BUILT_IN = [(group, name) for group in METHODS for name in installed(f"octavo.{group}")]


def check(group: str, factory: Any) -> None:
    getattr(policykit, f"check_{group}")(factory)


@pytest.mark.parametrize(("group", "name"), BUILT_IN)
def test_a_built_in_policy_keeps_the_contract(group: str, name: str) -> None:
    check(group, lambda: load_policy(group, name, {}))


@pytest.mark.parametrize(
    ("group", "name", "options"),
    [
        ("batching", "fair", {"takeover": True, "weights": {"ada": 3.0}}),
        ("batching", "scored", {"filters": ["fits"], "scores": {"age": 1, "prefix": 1, "priority": 1, "urgency": 1}}),
        ("batching", "static", {"size": 1000}),
        ("batching", "dynamic", {"size": 3, "delay_ms": 0}),
        ("eviction", "tenant-quota", {"weights": {"ada": 3.0, "cyd": 0.25}}),
        ("speculation", "adaptive", {"most": 0}),
    ],
)
def test_with_other_options_too(group: str, name: str, options: dict[str, Any]) -> None:
    check(group, lambda: load_policy(group, name, options))


@pytest.mark.parametrize(("group", "policy", "told"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_the_author_of_a_bad_policy_is_told(
    group: str, policy: type[Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "HANG_S", 0.5)
    with pytest.raises(PolicyFault) as caught:
        check(group, policy)
    assert re.search(told, str(caught.value)), caught.value
    assert caught.value.advice
