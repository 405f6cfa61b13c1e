"""Policies that hang or end their process: the actor starts anew without them; no request is lost, no token wrong."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import anyio
import pytest

from octavo.core.control import SetPolicy
from octavo.core.messages import Role
from octavo.core.policy.watch import Asked
from octavo.core.supervisor.policies import SetPolicies
from octavo.core.supervisor.status import tell
from tests.policies.hostile import installed
from tests.policies.streams import answers
from tests.processes.daemon import Daemon, daemon, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in installed(tmp_path_factory.mktemp("hostile")).items():
            patch.setenv(name, value)
        sets = ("supervisor.max_restarts=100", "supervisor.heartbeat_timeout_s=3.0", "kv.tokens=512")
        with daemon(*sets) as service:
            service.wait_ready()
            yield service


@pytest.fixture(scope="module")
def expected(service: Daemon) -> dict[int, str]:
    return anyio.run(answers, service.run_dir)


def trips(service: Daemon, name: str) -> list[dict[str, object]]:
    return [event for event in service.events("policy.tripped") if event["policy"] == name]


@pytest.mark.parametrize(
    ("group", "name", "role", "why"),
    [
        ("batching", "loops", "scheduler", "busy with the batching policy 'loops' for"),
        ("chunking", "exits", "scheduler", "its process ended with exit code 7 during its call"),
        ("eviction", "hogs", "kv", "silent for"),
    ],
)
def test_a_policy_that_takes_its_process_with_it_is_switched_off(
    service: Daemon, expected: dict[int, str], group: str, name: str, role: str, why: str
) -> None:
    before = service.actors()[role]
    assert tell(service.info(), SetPolicy(group=group, name=name, options={})) is not None
    assert anyio.run(answers, service.run_dir) == expected
    after = eventually("another process", lambda: service.wait_replaced(role, before.pid or 0)[role])
    assert after.restarts > before.restarts

    eventually("the trip is told", lambda: trips(service, name))
    tripped = trips(service, name)
    assert len(tripped) == 1
    assert why in str(tripped[0]["why"])
    eventually("status counts it", lambda: service.actors()[role].stats.get("policy_tripped"))
    status = service.status()
    assert status is not None
    (note,) = (note for note in status.notes if repr(name) in note)
    assert note.startswith(f"the {group} policy '{name}' is switched off")

    # Once another is set all is as before, in a successor too.
    default = {"batching": "fcfs", "chunking": "decode-first", "eviction": "lru"}[group]
    assert tell(service.info(), SetPolicy(group=group, name=default, options={})) is not None
    status = service.status()
    assert status is not None
    assert not [note for note in status.notes if "is switched off" in note]
    assert anyio.run(answers, service.run_dir) == expected


def test_a_process_killed_from_outside_is_a_policys_fault_only_when_it_happens_again() -> None:
    policies, asked = SetPolicies(), Asked("batching", "mine")
    assert policies.blame(asked, -signal.SIGKILL, "") is None
    assert policies.blame(Asked("batching", "other"), -signal.SIGKILL, "") is None
    off = policies.blame(asked, -signal.SIGKILL, "")
    assert off is not None
    assert "killed from outside 2 times" in off.disabled
    assert policies.of(Role.SCHEDULER) == [off]
    assert policies.of(Role.KV) == []


def test_a_policy_that_was_replaced_meanwhile_is_not_switched_off() -> None:
    policies = SetPolicies()
    policies.set(chosen := SetPolicy(group="eviction", name="lru", options={}))
    assert policies.blame(Asked("eviction", "mine"), -signal.SIGKILL, "silent for 11 s") is None
    assert policies.of(Role.KV) == [chosen]
    assert policies.blame(Asked("eviction", "lru"), -signal.SIGSEGV, "") is not None
    (note,) = policies.notes()
    assert "its process ended with signal 11 during its call" in note
    assert "choose another with `octavo policy set eviction=NAME`" in note
