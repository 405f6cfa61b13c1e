"""The supervisor's pure core: which processes exist, which state is alive, and who may speak to whom.

Each method takes what happened and answers with actions; the shell in `main` carries them out. No sockets, no
processes, no clock. What dies with what is in `table`, what an actor is doing in `child`.

    exited ─▶ bump generations ─▶ Topology(down) ─▶ Spawn … Ready ─▶ Topology(up) ─▶ all TopologyAcks ─▶ Go
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from octavo.core.config.schema import SupervisorConfig
from octavo.core.control import (
    DEGRADED,
    DRAINING,
    READY,
    STARTING,
    ActorStatus,
    AdapterLost,
    AdapterRead,
    AdapterSet,
    AskCache,
    AskStatus,
    Bye,
    CacheState,
    Go,
    Heartbeat,
    Hello,
    Member,
    QueueFull,
    Ready,
    SetAdapter,
    SetPolicy,
    SetShadow,
    SetWeights,
    Shutdown,
    Status,
    ToMember,
    Topology,
    TopologyAck,
    ToSupervisor,
    Who,
)
from octavo.core.messages import Facts, Role
from octavo.core.policy.watch import Asked
from octavo.core.supervisor.actions import Action, Kill, Note, Say, Spawn, Stop, Tell
from octavo.core.supervisor.adapters import NamedAdapters
from octavo.core.supervisor.child import Actor, Phase
from octavo.core.supervisor.clients import Clients
from octavo.core.supervisor.policies import SetPolicies, asks, exit_text
from octavo.core.supervisor.shadows import Shadows, epitaph
from octavo.core.supervisor.table import CHILDREN, MEMBERS
from octavo.core.trace.catalogue import (
    ActorExited,
    ActorReady,
    ActorRestarted,
    ActorStalled,
    ActorStarted,
    GenerationBumped,
    ServiceState,
)

WEIGHING = (Role.SCHEDULER, Role.KV)
"""Who asks policies, so is told of tenants' weights."""

LATE_NS = 1_000_000_000
"""A tick later than this means that the supervisor itself was held up, which is no fault of its children."""

DRAIN_PAUSE_NS = 1_000_000_000
"""Numbers count as those of a drained service only when they were sent this long after draining began."""


class SupervisorCore:
    """`endpoint(role, generation)` says where an actor's mailbox is; `asked(role)` which policy it is asking, or was
    when it ended."""

    def __init__(
        self,
        config: SupervisorConfig,
        roles: tuple[Role, ...],
        endpoint: Callable[[Role, int], str],
        pid: int,
        asked: Callable[[Role], Asked | None] = lambda role: None,
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._asked = asked
        self._pid = pid
        self.actors = {role: Actor(role) for role in CHILDREN if role in roles}
        self._clients = Clients()
        self._epoch = 0
        self._awaited: set[Role] = set()
        """Members whose acknowledgement of this epoch is missing."""
        self._gone = False
        """Go of this epoch was given."""
        self._facts: Facts | None = None
        self._announced = False
        """The whole service was ready once."""
        self._drain_ns: int | None = None
        self._stopping = False
        self._ticked_ns: int | None = None
        self._state = ""
        self._policies = SetPolicies()
        self._shadows = Shadows()
        self._weights: SetWeights | None = None
        self._adapters = NamedAdapters()

    # ── what happens ─────────────────────────────────────────────────────────────────────────────

    def start(self) -> list[Action]:
        """Everything at once; each waits for what it needs."""
        return [*self._new_state(STARTING, ""), *(Spawn(role, actor.generation) for role, actor in self.actors.items())]

    def spawned(self, role: Role, pid: int, now_ns: int) -> list[Action]:
        actor = self.actors[role]
        actor.spawned(pid, now_ns)
        return [Note(ActorStarted(actor=actor.name, pid=pid, actor_generation=actor.generation))]

    def exited(self, role: Role, code: int, now_ns: int) -> list[Action]:
        """Its process ended, whyever: its state is lost, and what hangs on it."""
        actor = self.actors[role]
        what = f"{actor.name} (pid {actor.pid}) ended with {exit_text(code)}"
        actions: list[Action] = [
            Note(ActorExited(actor=actor.name, pid=actor.pid or 0, actor_generation=actor.generation, code=code))
        ]
        if actor.identity is not None:
            actions += self._clients.lose(actor.identity, self._tokenizer())
        actor.exited()
        asked = self._asked(role)
        if asked is not None and (off := self._policies.blame(asked, code, actor.killed_for)) is not None:
            actions.append(Say("error", f"{asked} is switched off: {off.disabled}"))
        if role is Role.EXECUTOR:
            actions += (Tell(who, answer) for who, answer in self._adapters.executor_lost())
        if self._stopping:
            return actions
        if not actor.was_ready:
            return [*actions, *self._stop(1, f"{what} before it was ready; see its lines above")]
        actions.append(Say("warning", f"{what}; restarting"))
        for lost in CHILDREN[role].bumps:
            actions += self._bump(self.actors[lost], what)
        actions += self._broadcast()
        if not actor.may_restart(self._config, now_ns):
            limit = f"{self._config.max_restarts} restarts in {self._config.restart_window_s:g} s"
            return [*actions, *self._stop(1, f"{what}, and {limit} are used up")]
        actions.append(
            Note(ActorRestarted(actor=actor.name, actor_generation=actor.generation, restarts=len(actor.restarts)))
        )
        return [*actions, Spawn(role, actor.generation)]

    def shadow_started(self, shadow: SetShadow, pid: int) -> list[Action]:
        return self._shadows.started(shadow, pid)

    def shadow_ended(self, group: str, pid: int, code: int) -> list[Action]:
        """Its process ended, whyever; nothing hangs on it."""
        shadow = self._shadows.ended(group, pid)
        if shadow is None or self._stopping:
            return []
        return [*epitaph(shadow, pid, code), *self._tell_actor(asks(group), [SetShadow(group=group)])]

    def heard(self, identity: bytes, message: ToSupervisor, now_ns: int) -> list[Action]:
        """A member said something."""
        if isinstance(message, Hello):
            return self._hello(identity, message, now_ns)
        if isinstance(message, AskStatus):
            return [Tell(identity, self.status(now_ns))]
        if isinstance(message, SetShadow):
            told = self._tell_actor(asks(message.group), [message])
            return [*self._shadows.set(message), *told, Tell(identity, self.status(now_ns))]
        if isinstance(message, SetWeights):
            self._weights = message
            return [action for role in WEIGHING for action in self._tell_actor(role, [message])]
        if isinstance(message, AskCache):
            told = self._tell_actor(Role.KV, [replace(message, asker=identity)])
            return told or [Tell(identity, CacheState(ref=message.ref, error="the KV-manager is being started"))]
        if isinstance(message, CacheState):
            return [Tell(message.asker, message)] if identity == self.actors[Role.KV].identity else []
        if isinstance(message, SetPolicy):
            self._policies.set(message)
            told = self._tell_actor(asks(message.group), [message])
            return [*told, Tell(identity, self.status(now_ns))]
        actor = next((a for a in self.actors.values() if a.identity == identity), None)
        if actor is not None:
            actor.heard_ns = now_ns
        if isinstance(message, SetAdapter | AdapterRead | AdapterLost):
            return self._about_adapters(identity, message)
        match message:
            case Bye():
                return self._clients.lose(identity, self._tokenizer())
            case Heartbeat(progress):
                known = self._clients.heard(identity, now_ns)
                unknown = not known and (actor is None or actor.role not in MEMBERS)
                actions: list[Action] = [Tell(identity, Who())] if unknown else []
                if actor is not None:
                    actor.heard(progress, now_ns)
                    actions += self._drained(now_ns)
                return actions
            case Ready(facts, adapters=adapters):
                if adapters:
                    self._adapters.begin(adapters)
                return [] if actor is None else self._ready(actor, facts, now_ns)
            case QueueFull():
                return self._drowned(message, now_ns)
            case TopologyAck(epoch):
                return [] if actor is None else self._acknowledged(actor, epoch)

    def tick(self, now_ns: int) -> list[Action]:
        """Called a few times a second, after everything that was said has been heard."""
        held_up = 0 if self._ticked_ns is None else now_ns - self._ticked_ns - LATE_NS
        self._ticked_ns = now_ns
        if held_up > 0:
            for actor in self.actors.values():
                actor.heard_ns = actor.moved_ns = now_ns
            self._clients.forgive(now_ns)
        if self._stopping:
            return []
        actions: list[Action] = self._clients.expire(now_ns, self._config.client_timeout_s, self._tokenizer())
        for actor in self.actors.values():
            why = actor.complaint(self._config, now_ns, partial(self._asked, actor.role))
            if why is not None:
                actions += self._kill(actor, why, now_ns)
        return [*actions, *self._drained(now_ns)]

    def _kill(self, actor: Actor, why: str, now_ns: int) -> list[Action]:
        if actor.pid is None:
            return []
        actor.heard_ns = actor.moved_ns = actor.started_ns = now_ns  # its exit is on its way
        actor.killed_for = why
        return [
            Note(ActorStalled(actor=actor.name, pid=actor.pid, why=why)),
            Say("error", f"{actor.name} (pid {actor.pid}) is {why}: killing it"),
            Kill(actor.role),
        ]

    def _drowned(self, full: QueueFull, now_ns: int) -> list[Action]:
        """Messages to this peer were lost. What it is missing nobody knows, so its state is given up as if it had died:
        clients resubmit, and nothing waits for ever for what never came."""
        if full.name:
            return self._clients.lose_named(full.name, self._tokenizer())
        actor = self.actors[full.role]
        if actor.generation != full.generation or actor.killed_for:
            return []  # it is dead or dying already
        return self._kill(actor, "too far behind: its queue is full", now_ns)

    def drain(self, now_ns: int) -> list[Action]:
        """Finish what there is, take nothing new, then stop. Asked again: stop at once."""
        if self._drain_ns is not None:
            return self._stop(0, "asked twice to stop")
        self._drain_ns = now_ns
        return [Say("info", "draining; once more to stop at once"), *self._broadcast(), *self._drained(now_ns)]

    @property
    def draining(self) -> bool:
        return self._drain_ns is not None

    def farewell(self) -> list[Action]:
        """When the service stops. Who is still loading has nothing to finish, and may not listen for long."""
        loading = [Kill(a.role) for a in self.actors.values() if a.pid is not None and a.phase is Phase.STARTING]
        return [*loading, *(Tell(identity, Shutdown("the service stops")) for identity in self._everyone())]

    # ── members ──────────────────────────────────────────────────────────────────────────────────

    def _hello(self, identity: bytes, hello: Hello, now_ns: int) -> list[Action]:
        if hello.role in self.actors:
            actor = self.actors[hello.role]
            if hello.pid != actor.pid:
                return [Tell(identity, Shutdown(f"pid {hello.pid} is not this service's {actor.name}"))]
            actor.identity, actor.heard_ns = identity, now_ns
        if hello.role not in MEMBERS:
            self._clients.add(hello.name, identity, now_ns, supervised=hello.role is Role.GATEWAY)
        actions: list[Action] = [Tell(identity, self.topology())]
        if hello.role is not Role.EXECUTOR:  # it is told when it is ready: until then it knows better
            actions.insert(0, Tell(identity, self._adapters.listing()))
        if self._gone:
            actions.append(Tell(identity, Go(self._epoch)))
        return actions

    def _ready(self, actor: Actor, facts: Facts | None, now_ns: int) -> list[Action]:
        if actor.phase is Phase.READY:
            return []  # its state was made anew, and the topology says so already
        actor.phase, actor.was_ready, actor.moved_ns = Phase.READY, True, now_ns
        actions: list[Action] = []
        if facts is not None:
            if self._facts is None:
                actions = [Say("info", f"executor: {facts.executor}")]
            self._facts = facts
        took_ns = now_ns - actor.started_ns
        ready = ActorReady(
            actor=actor.name,
            pid=actor.pid or 0,
            actor_generation=actor.generation,
            took_ns=took_ns,
            how="" if facts is None else facts.executor,
            drafter="" if facts is None else facts.drafter,
        )
        set_up: list[ToMember] = [*self._policies.of(actor.role), *self._shadows.of(actor.role)]
        if self._weights is not None and actor.role in WEIGHING:
            set_up.append(self._weights)
        actions += [Note(ready), *self._tell_actor(actor.role, set_up)]
        if actor.role is Role.EXECUTOR:  # before the topology: what runs then finds its adapter read
            actions += self._tell_adapters()
        return actions + (self._broadcast() if actor.role in MEMBERS else self._settled())

    def _tell_actor(self, role: Role, messages: Sequence[ToMember]) -> list[Action]:
        """If the actor is there to hear of them; else it is told when it is."""
        actor = self.actors.get(role)
        if actor is None or actor.identity is None or actor.phase is not Phase.READY:
            return []
        return [Tell(actor.identity, message) for message in messages]

    def _about_adapters(self, identity: bytes, message: SetAdapter | AdapterRead | AdapterLost) -> list[Action]:
        match message:
            case SetAdapter():
                answer = self._adapters.wish(identity, message)
                if answer is None:
                    return [*self._tell_adapters(), Tell(identity, AdapterSet(ref=message.ref))]
                if isinstance(answer, AdapterSet):
                    return [Tell(identity, answer)]
                told = self._tell_actor(Role.EXECUTOR, [answer])
                return told or [Tell(who, why) for who, why in self._adapters.executor_lost()]
            case AdapterRead():
                settled = self._adapters.read(message)
                if settled is None:
                    return []
                who, answer = settled
                return [*([] if answer.why else self._tell_adapters()), Tell(who, answer)]
            case AdapterLost():
                if not self._adapters.lost(message):
                    return []
                return [Say("error", f"{message.why}: it has no name any more"), *self._tell_adapters()]

    def _tell_adapters(self) -> list[Action]:
        return [Tell(identity, self._adapters.listing()) for identity in self._everyone()]

    def _bump(self, actor: Actor, why: str) -> list[Action]:
        actor.generation += 1
        return [Note(GenerationBumped(actor=actor.name, actor_generation=actor.generation, why=why))]

    def _tokenizer(self) -> bytes | None:
        return self.actors[Role.TOKENIZER].identity

    # ── topology ─────────────────────────────────────────────────────────────────────────────────

    def _up(self, role: Role) -> bool:
        return self.actors[role].phase is Phase.READY and all(self._up(need) for need in CHILDREN[role].needs)

    def topology(self) -> Topology:
        members = [
            Member(
                role=role,
                replica=0,
                generation=self.actors[role].generation,
                endpoint=self._endpoint(role, self.actors[role].generation),
                up=self._up(role),
            )
            for role in MEMBERS
        ]
        return Topology(epoch=self._epoch, state=self._service_state(), members=members, facts=self._facts)

    def _broadcast(self) -> list[Action]:
        """A new epoch: everyone hears it, and Go waits for those who are up."""
        self._epoch += 1
        self._gone = False
        self._awaited = {role for role in MEMBERS if self._up(role)}
        topology = self.topology()
        return [*(Tell(identity, topology) for identity in self._everyone()), *self._settled()]

    def _everyone(self) -> list[bytes]:
        actors = [actor.identity for actor in self.actors.values() if actor.identity is not None]
        return list(dict.fromkeys([*actors, *self._clients.identities()]))

    def _acknowledged(self, actor: Actor, epoch: int) -> list[Action]:
        if epoch == self._epoch:
            self._awaited.discard(actor.role)
        return self._settled()

    def _settled(self) -> list[Action]:
        """Give Go once all have acknowledged; tell the world when the service's state is another."""
        actions: list[Action] = []
        if not self._awaited and not self._gone:
            self._gone = True
            actions += [Tell(identity, Go(self._epoch)) for identity in self._everyone()]
        state = self._service_state()
        gateway = self.actors.get(Role.GATEWAY)
        if state == READY and (not self._gone or (gateway is not None and gateway.phase is not Phase.READY)):
            return actions
        self._announced |= state == READY
        return [*actions, *self._new_state(state, self._missing())]

    def _service_state(self) -> str:
        if self._drain_ns is not None:
            return DRAINING
        if all(self._up(role) for role in MEMBERS):
            return READY
        return DEGRADED if self._announced else STARTING

    def _missing(self) -> str:
        down = [role.name.lower() for role in MEMBERS if not self._up(role)]
        return f"waiting for {', '.join(down)}" if down else ""

    def _new_state(self, state: str, why: str) -> list[Action]:
        if state == self._state:
            return []
        self._state = state
        return [Note(ServiceState(state=state, why=why)), Say("info", f"{state}; {why}" if why else state)]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def _drained(self, now_ns: int) -> list[Action]:
        if self._drain_ns is None or self._stopping:
            return []
        waited_ns = now_ns - self._drain_ns
        limit_s = self._config.drain_timeout_s
        if waited_ns > limit_s * 1e9:
            return self._stop(0, f"requests were still running after {limit_s:g} s of draining")
        for role in (Role.TOKENIZER, Role.SCHEDULER):
            actor = self.actors[role]
            fresh = actor.heard_ns >= self._drain_ns + DRAIN_PAUSE_NS and actor.progress.busy_since_ns is None
            if actor.phase is Phase.READY and not (fresh and actor.is_idle):
                return []
        return self._stop(0, "drained")

    def _stop(self, code: int, why: str) -> list[Action]:
        self._stopping = True
        self._state = "failed" if code else "stopped"
        return [Note(ServiceState(state=self._state, why=why)), Stop(code, why)]

    def status(self, now_ns: int) -> Status:
        """What `octavo status` shows."""
        me = ActorStatus(
            role="supervisor",
            name="supervisor",
            pid=self._pid,
            generation=1,
            state=self._state,
            restarts=0,
            progress_age_s=0.0,
            stats={"clients": len(self._clients.identities())},
        )
        others = [
            ActorStatus(
                role=actor.name,
                name=actor.name,
                pid=actor.pid,
                generation=actor.generation,
                state=actor.phase.value,
                restarts=len(actor.restarts),
                progress_age_s=(now_ns - actor.moved_ns) / 1e9 if actor.pid is not None else None,
                stats=actor.progress.stats,
            )
            for actor in self.actors.values()
        ]
        about = [] if self._facts is None else [f"executor: {self._facts.executor}", self._facts.note]
        notes = [*(note for note in about if note), *self._policies.notes()]
        return Status(state=self._state, epoch=self._epoch, actors=[me, *others], notes=notes)
