"""The supervisor's decisions, without a process or a socket."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.core.config.schema import SupervisorConfig
from octavo.core.control import (
    DEGRADED,
    DRAINING,
    READY,
    Adapters,
    AskCache,
    Bye,
    CacheState,
    ClientGone,
    Go,
    Heartbeat,
    Hello,
    Progress,
    QueueFull,
    Ready,
    SetShadow,
    SetWeights,
    Shutdown,
    Topology,
    TopologyAck,
    ToSupervisor,
    Who,
)
from octavo.core.messages import Facts, Role
from octavo.core.supervisor.actions import Action, Kill, Note, Spawn, Stop, Tell
from octavo.core.supervisor.core import SupervisorCore
from octavo.core.supervisor.table import CHILDREN, MEMBERS
from octavo.core.trace.catalogue import ActorStalled, GenerationBumped

SECOND = 1_000_000_000
CLIENT = b"a client"

FACTS = Facts(
    model_id="ghost", context=64, vocab_size=260, block_size=4, total_blocks=16, block_bytes=32, cache_seed=b"s"
)


class Service:
    """Drives a core as its shell would: spawns at once, every member answers."""

    def __init__(self, config: SupervisorConfig | None = None) -> None:
        roles = tuple(CHILDREN)
        self.core = SupervisorCore(config or SupervisorConfig(), roles, lambda role, g: f"ipc://{role.name}.{g}", 1)
        self.now_ns = SECOND
        self.pids: dict[Role, int] = {}
        self.told: list[Tell] = []
        self.actions: list[Action] = []
        self._last_pid = 100

    def do(self, actions: list[Action]) -> list[Action]:
        """Carry out; answers with all that was asked for."""
        done: list[Action] = []
        while actions:
            action = actions.pop(0)
            done.append(action)
            if isinstance(action, Spawn):
                self._last_pid += 1
                self.pids[action.role] = self._last_pid
                actions += self.core.spawned(action.role, self._last_pid, self.now_ns)
        self.actions += done
        return done

    def say(self, role: Role, message: ToSupervisor) -> list[Action]:
        return self.do(self.core.heard(self.identity(role), message, self.now_ns))

    def identity(self, role: Role) -> bytes:
        return f"{role.name}-{self.pids[role]}".encode()

    def load(self, role: Role) -> list[Action]:
        hello = self.say(role, Hello(role=role, name=role.name.lower(), pid=self.pids[role]))
        return hello + self.say(role, Ready(FACTS if role is Role.EXECUTOR else None))

    def acknowledge(self, *roles: Role) -> list[Action]:
        epoch = self.core.topology().epoch
        return [action for role in roles or MEMBERS for action in self.say(role, TopologyAck(epoch))]

    def all_ready(self) -> None:
        self.do(self.core.start())
        for role in CHILDREN:
            self.load(role)
        self.acknowledge()

    def die(self, role: Role, code: int = -9) -> list[Action]:
        return self.do(self.core.exited(role, code, self.now_ns))

    def beat(self, role: Role, progress: Progress | None = None) -> list[Action]:
        return self.say(role, Heartbeat(progress or Progress()))

    def pass_time(
        self, seconds: float, *, silent: Sequence[Role] = (), progress: Progress | None = None
    ) -> list[Action]:
        """Time goes by in heartbeats; all but the `silent` give theirs."""
        done: list[Action] = []
        for _ in range(int(seconds / 0.5)):
            self.now_ns += SECOND // 2
            for role in CHILDREN:
                if role not in silent and role in self.pids:
                    done += self.beat(role, progress)
            done += self.do(self.core.tick(self.now_ns))
        return done

    def generations(self) -> dict[Role, int]:
        return {role: actor.generation for role, actor in self.core.actors.items()}


def topologies(actions: list[Action]) -> list[Topology]:
    return [a.message for a in actions if isinstance(a, Tell) and isinstance(a.message, Topology)]


def goes(actions: list[Action]) -> list[Go]:
    return [a.message for a in actions if isinstance(a, Tell) and isinstance(a.message, Go)]


def stops(actions: list[Action]) -> list[Stop]:
    return [a for a in actions if isinstance(a, Stop)]


@pytest.fixture
def service() -> Service:
    service = Service()
    service.all_ready()
    return service


def test_everything_starts_at_once_and_facts_come_with_the_executor() -> None:
    service = Service()
    started = service.do(service.core.start())
    assert [a.role for a in started if isinstance(a, Spawn)] == list(CHILDREN)
    service.say(Role.KV, Hello(role=Role.KV, name="kv", pid=service.pids[Role.KV]))
    told = topologies(service.load(Role.EXECUTOR))
    assert told[-1].facts == FACTS
    assert service.core.topology().state != READY


def test_go_is_given_once_and_only_when_every_member_has_acknowledged(service: Service) -> None:
    service.die(Role.SCHEDULER)
    service.load(Role.SCHEDULER)
    assert service.core.topology().state == READY
    for role in (Role.EXECUTOR, Role.KV, Role.TOKENIZER):
        assert goes(service.acknowledge(role)) == []
    epoch = service.core.topology().epoch
    given = goes(service.acknowledge(Role.SCHEDULER))
    assert set(given) == {Go(epoch)}
    assert len(given) == len(CHILDREN), "the gateway hears it too"
    assert goes(service.acknowledge()) == []


def test_an_acknowledgement_of_a_former_epoch_counts_for_nothing(service: Service) -> None:
    service.die(Role.SCHEDULER)
    service.load(Role.SCHEDULER)
    former = service.core.topology().epoch
    service.die(Role.TOKENIZER)
    for role in MEMBERS:
        if role is not Role.TOKENIZER:
            assert goes(service.say(role, TopologyAck(former))) == []


@pytest.mark.parametrize(
    ("dies", "bumped"),
    [
        (Role.EXECUTOR, {Role.EXECUTOR, Role.KV}),
        (Role.KV, {Role.KV}),
        (Role.SCHEDULER, {Role.SCHEDULER}),
        (Role.TOKENIZER, {Role.TOKENIZER}),
        (Role.GATEWAY, {Role.GATEWAY}),
    ],
)
def test_what_dies_with_what(service: Service, dies: Role, bumped: set[Role]) -> None:
    before = service.generations()
    actions = service.die(dies)
    assert {role for role, g in service.generations().items() if g != before[role]} == bumped
    assert {a.event.actor for a in actions if isinstance(a, Note) and isinstance(a.event, GenerationBumped)} == {
        role.name.lower() for role in bumped
    }
    assert [a.role for a in actions if isinstance(a, Spawn)] == [dies], "only the process that died is started"
    announced = topologies(actions)[-1]
    assert {member.role for member in announced.members if not member.up} == bumped & set(MEMBERS)
    assert announced.state == (READY if dies is Role.GATEWAY else DEGRADED)


def test_the_kv_manager_is_up_again_with_the_executor_that_it_describes(service: Service) -> None:
    service.die(Role.EXECUTOR)
    announced = topologies(service.load(Role.EXECUTOR))[-1]
    member = announced.member(Role.KV)
    assert member is not None
    assert member.up
    assert member.generation == 2
    assert member.endpoint.endswith("KV.2")


def test_restarts_beyond_the_intensity_stop_the_service_with_the_cause() -> None:
    service = Service(SupervisorConfig(max_restarts=2, restart_window_s=10))
    service.all_ready()
    for _ in range(2):
        assert stops(service.die(Role.KV)) == []
        service.load(Role.KV)
    (stop,) = stops(service.die(Role.KV))
    assert stop.code == 1
    assert "kv" in stop.why
    assert "2 restarts in 10 s" in stop.why


def test_restarts_are_counted_per_actor_and_forgotten_after_the_window() -> None:
    service = Service(SupervisorConfig(max_restarts=1, restart_window_s=10))
    service.all_ready()
    for role in (Role.KV, Role.SCHEDULER):
        assert stops(service.die(role)) == []
        service.load(role)
    service.pass_time(10.5)
    assert stops(service.die(Role.KV)) == []


def test_an_actor_that_never_was_ready_is_not_tried_again() -> None:
    service = Service()
    service.do(service.core.start())
    service.load(Role.EXECUTOR)
    actions = service.die(Role.SCHEDULER, code=1)
    (stop,) = stops(actions)
    assert stop.code == 1
    assert "before it was ready" in stop.why
    assert not any(isinstance(a, Spawn) for a in actions)


def killed(actions: list[Action]) -> dict[Role, str]:
    notes = [a.event for a in actions if isinstance(a, Note)]
    why = {event.actor: event.why for event in notes if isinstance(event, ActorStalled)}
    return {a.role: why[a.role.name.lower()] for a in actions if isinstance(a, Kill)}


def test_silence_is_answered_with_a_kill(service: Service) -> None:
    assert killed(service.pass_time(9, silent=[Role.KV])) == {}
    assert list(killed(service.pass_time(2, silent=[Role.KV]))) == [Role.KV]


def test_work_without_progress_is_answered_with_a_kill_and_idleness_is_not() -> None:
    service = Service(SupervisorConfig(stall_timeout_s=5))
    service.all_ready()
    assert killed(service.pass_time(20)) == {}
    for counter in range(10):
        assert killed(service.pass_time(4, progress=Progress(counter=counter, busy_since_ns=1))) == {}
    stalled = killed(service.pass_time(4, progress=Progress(counter=9, busy_since_ns=1)))
    assert set(stalled) == set(CHILDREN)
    assert "busy without progress" in stalled[Role.EXECUTOR]


def test_loading_may_take_long_but_not_for_ever() -> None:
    service = Service(SupervisorConfig(ready_timeout_s=100, heartbeat_timeout_s=1, stall_timeout_s=1))
    service.do(service.core.start())
    assert killed(service.pass_time(99, progress=Progress(busy_since_ns=1))) == {}
    assert set(killed(service.pass_time(2))) == set(CHILDREN)


def test_a_supervisor_that_was_held_up_blames_nobody(service: Service) -> None:
    service.pass_time(2)
    service.now_ns += 1000 * SECOND
    assert killed(service.do(service.core.tick(service.now_ns))) == {}


def attach(service: Service) -> list[Action]:
    hello = Hello(role=Role.CLIENT, name="chat", pid=7)
    return service.do(service.core.heard(CLIENT, hello, service.now_ns))


def gone(actions: list[Action]) -> list[tuple[bytes, str]]:
    return [(a.identity, a.message.name) for a in actions if isinstance(a, Tell) and isinstance(a.message, ClientGone)]


def test_a_client_hears_the_topology_and_go_at_once_and_every_later_one(service: Service) -> None:
    first = attach(service)
    assert [type(a.message) for a in first if isinstance(a, Tell)] == [Adapters, Topology, Go]
    assert CLIENT in [a.identity for a in service.die(Role.KV) if isinstance(a, Tell)]


def test_the_tokenizer_hears_of_a_client_that_leaves_or_falls_silent(service: Service) -> None:
    attach(service)
    expected = [(service.identity(Role.TOKENIZER), "chat")]
    assert gone(service.do(service.core.heard(CLIENT, Bye(), service.now_ns))) == expected
    attach(service)
    assert gone(service.pass_time(9)) == []
    assert gone(service.pass_time(2)) == expected
    late = service.do(service.core.heard(CLIENT, Heartbeat(Progress()), service.now_ns))
    assert [a.message for a in late if isinstance(a, Tell)] == [Who()]


def test_an_actor_whose_queue_is_full_is_killed_once(service: Service) -> None:
    """What it is missing nobody knows: only its clients do, who will resubmit."""
    full = QueueFull(role=Role.SCHEDULER, generation=service.generations()[Role.SCHEDULER])
    assert "queue is full" in killed(service.say(Role.TOKENIZER, full))[Role.SCHEDULER]
    assert killed(service.say(Role.TOKENIZER, full)) == {}, "it is dying already"
    service.die(Role.SCHEDULER)
    service.load(Role.SCHEDULER)
    assert killed(service.say(Role.TOKENIZER, full)) == {}, "that was another state"


def test_a_client_whose_queue_is_full_attaches_again(service: Service) -> None:
    attach(service)
    lost = service.say(Role.TOKENIZER, QueueFull(role=Role.CLIENT, name="chat"))
    assert gone(lost) == [(service.identity(Role.TOKENIZER), "chat")]
    assert gone(service.say(Role.TOKENIZER, QueueFull(role=Role.CLIENT, name="chat"))) == []
    late = service.do(service.core.heard(CLIENT, Heartbeat(Progress()), service.now_ns))
    assert [a.message for a in late if isinstance(a, Tell)] == [Who()]


def test_the_gateway_too(service: Service) -> None:
    assert gone(service.say(Role.TOKENIZER, QueueFull(role=Role.CLIENT, name="gateway")))
    assert [a.message for a in service.beat(Role.GATEWAY) if isinstance(a, Tell)] == [Who()]
    service.load(Role.GATEWAY)
    assert [a for a in service.beat(Role.GATEWAY) if isinstance(a, Tell)] == []


def test_the_gateways_death_is_its_clients(service: Service) -> None:
    assert gone(service.die(Role.GATEWAY)) == [(service.identity(Role.TOKENIZER), "gateway")]


def test_a_stranger_who_says_to_be_an_actor_is_sent_away(service: Service) -> None:
    hello = Hello(role=Role.KV, name="kv", pid=4)
    (answer,) = service.do(service.core.heard(b"?", hello, service.now_ns))
    assert isinstance(answer, Tell)
    assert isinstance(answer.message, Shutdown)


def test_draining_waits_for_what_is_under_way(service: Service) -> None:
    busy = Progress(stats={"running": 1, "waiting": 0})
    announced = topologies(service.do(service.core.drain(service.now_ns)))
    assert announced[-1].state == DRAINING
    assert stops(service.pass_time(5, progress=busy)) == []
    (stop, *_) = stops(service.pass_time(5, progress=Progress(stats={"running": 0, "waiting": 0})))
    assert stop.code == 0


def test_draining_ends_after_its_time() -> None:
    service = Service(SupervisorConfig(drain_timeout_s=5))
    service.all_ready()
    service.do(service.core.drain(service.now_ns))
    (stop, *_) = stops(service.pass_time(6, progress=Progress(stats={"waiting": 3})))
    assert "after 5 s" in stop.why


def test_asked_twice_to_stop_it_does_at_once(service: Service) -> None:
    assert stops(service.do(service.core.drain(service.now_ns))) == []
    (stop,) = stops(service.do(service.core.drain(service.now_ns)))
    assert stop.code == 0
    assert stops(service.die(Role.KV)) == []
    assert not any(isinstance(a, Spawn) for a in service.die(Role.SCHEDULER))


def test_that_a_shadow_ends_is_said_unless_everything_does(service: Service) -> None:
    shadow = SetShadow(group="batching", name="fair")
    for stops_first in (False, True):
        service.do(service.core.heard(CLIENT, shadow, service.now_ns))
        service.do(service.core.shadow_started(shadow, 7))
        if stops_first:
            service.do(service.core.drain(service.now_ns))
            service.do(service.core.drain(service.now_ns))
        assert bool(service.do(service.core.shadow_ended("batching", 7, -9))) != stops_first


def test_at_the_end_who_listens_is_told_and_who_still_loads_is_killed() -> None:
    service = Service()
    service.do(service.core.start())
    service.load(Role.EXECUTOR)
    service.die(Role.GATEWAY, code=78)
    farewell = service.core.farewell()
    assert {a.role for a in farewell if isinstance(a, Kill)} == {Role.KV, Role.SCHEDULER, Role.TOKENIZER}
    assert [a.identity for a in farewell if isinstance(a, Tell)] == [service.identity(Role.EXECUTOR)]


def test_weights_go_to_those_who_ask_policies_and_to_their_successors(service: Service) -> None:
    weights = SetWeights({"ada": 3.0})
    told = [
        (action.identity, action.message) for action in service.say(Role.GATEWAY, weights) if isinstance(action, Tell)
    ]
    assert told == [(service.identity(role), weights) for role in (Role.SCHEDULER, Role.KV)]
    service.do(service.core.exited(Role.SCHEDULER, 1, service.now_ns))
    assert Tell(service.identity(Role.SCHEDULER), weights) in service.load(Role.SCHEDULER)


def test_the_cache_is_asked_of_the_kv_manager_and_its_answer_goes_to_who_asked(service: Service) -> None:
    asked = AskCache(ref=7, flush=True, tenant="ada")
    (told,) = service.do(service.core.heard(CLIENT, asked, service.now_ns))
    assert told == Tell(service.identity(Role.KV), AskCache(ref=7, flush=True, tenant="ada", asker=CLIENT))
    state = CacheState(ref=7, asker=CLIENT, freed=3)
    assert service.say(Role.KV, state) == [Tell(CLIENT, state)]
    assert service.say(Role.SCHEDULER, state) == [], "only the KV-manager knows"
    service.do(service.core.exited(Role.KV, 1, service.now_ns))
    (answer,) = service.do(service.core.heard(CLIENT, asked, service.now_ns))
    assert isinstance(answer, Tell)
    assert isinstance(answer.message, CacheState)
    assert answer.message.error
