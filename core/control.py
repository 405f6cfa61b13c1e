"""The control plane's messages: what the supervisor and its members (actors and clients) say to each other.

Structs only; `control_link` carries them for a member, `supervisor` decides them. Control never waits behind
work: it has sockets of its own.

    member ─Hello, Ready, Heartbeat, TopologyAck, Bye, QueueFull, AskStatus─▶ supervisor
           ◀─Topology, Go, ClientGone, Who, Shutdown, Status─
           ─SetPolicy, SetShadow, SetWeights, AskCache─▶ supervisor ─the same─▶ who it is for
           ◀─CacheState─ supervisor ◀─CacheState─ KV-manager
           ─SetAdapter─▶ supervisor ─ReadAdapter─▶ executor ─AdapterRead, AdapterLost─▶ supervisor
           ◀─Adapters, AdapterSet─ supervisor

A link between two actors changes in this order: a Topology that shows one end down; a Topology with the new
generation up; everyone's TopologyAck, after which each accepts that generation; then Go, and only now does
anyone send on the changed links. So no frame is ever early.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from octavo.core.messages import Adapter, Facts, Role

STARTING, READY, DEGRADED, DRAINING = "starting", "ready", "degraded", "draining"
"""States of the service: before the first Go, able to run a step, missing an actor, finishing what it has."""


class Control(msgspec.Struct, tag=True, frozen=True):
    """Base of everything on the control plane."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat carries. `counter` messages handled so far; `busy_since_ns` is when the one in hand was
    begun, None between messages; `stats` small numbers of the actor's own (running, waiting, used blocks …)."""

    counter: int = 0
    busy_since_ns: int | None = None
    stats: dict[str, int] = {}


# ── member → supervisor ──────────────────────────────────────────────────────────────────────────


class Hello(Control, frozen=True, kw_only=True):
    """First message, and the answer to Who. `endpoint` is a client's mailbox; an actor's is known."""

    role: Role
    name: str
    pid: int
    replica: int = 0
    generation: int = 0
    endpoint: str = ""


class Ready(Control, frozen=True):
    """Loaded. The executor says what it knows of its model, the gateway where it listens. `adapters` are those of the
    configuration, as the first executor of a run has read them."""

    facts: Facts | None = None
    address: str | None = None
    adapters: list[Adapter] = []


class Heartbeat(Control, frozen=True):
    progress: Progress


class TopologyAck(Control, frozen=True):
    """Frames of the generations in this epoch are accepted from now on."""

    epoch: int


class Bye(Control, frozen=True):
    """A client leaves."""


class QueueFull(Control, frozen=True, kw_only=True):
    """What an actor sent to this peer (an actor of that generation, or the client `name`) found its queue full, and is
    lost: it takes nothing any more, or it is far too slow."""

    role: Role
    generation: int = 0
    name: str = ""


class AskStatus(Control, frozen=True):
    """Answered with `Status`."""


class SetPolicy(Control, frozen=True, kw_only=True):
    """From a command, and on to the actor that asks the policy (and to its successors): another one from the next step
    on. Answered with `Status`. From the supervisor, `disabled` says why this one must not be asked any more."""

    group: str
    name: str
    options: dict[str, Any]
    disabled: str = ""


class SetShadow(Control, frozen=True, kw_only=True):
    """From a command: run this policy beside the live one of its group, on copies of its calls and without effect; with
    no `name`, end that. And on to the actor that asks the policy (and to its successors), which sends the copies.
    Answered with `Status`."""

    group: str
    name: str = ""
    options: dict[str, Any] = {}


class SetWeights(Control, frozen=True):
    """From a gateway, and on to the scheduler and the KV-manager (and to their successors): tenants' shares by name,
    for policies that want to know them."""

    weights: dict[str, float]


class AskCache(Control, frozen=True, kw_only=True):
    """From a client or a command, and on to the KV-manager: how is the prefix tree? With `flush`, take out of it first
    what belongs to `tenant` (None: to anybody) and begins with the ids `prefix`. Answered with `CacheState` under the
    same `ref`; `asker` is the supervisor's note of whom to tell."""

    ref: int
    flush: bool = False
    tenant: str | None = None
    prefix: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] = []
    asker: bytes = b""


class TenantBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one tenant in the prefix tree, and how many of these are in use."""

    tenant: str
    cached: int
    used: int


class CacheState(Control, frozen=True, kw_only=True):
    """The KV-manager's answer, in blocks; or the supervisor's, with an `error`, if it cannot be asked. What was flushed
    is `freed`, or free (`in_use`) when the sequences that use it end; `from_host` were in host memory, which any flush
    empties."""

    ref: int
    asker: bytes = b""
    error: str = ""
    total: int = 0
    free: int = 0
    used: int = 0
    tenants: list[TenantBlocks] = []
    freed: int = 0
    in_use: int = 0
    from_host: int = 0


class SetAdapter(Control, frozen=True, kw_only=True):
    """From a client: let `name` stand for the LoRA adapter at `path`, or for none if that is "". A name that is taken
    is given away only with `replace`. Answered with `AdapterSet` of the same `ref`."""

    ref: int
    name: str
    path: str = ""
    replace: bool = False


class AdapterRead(Control, frozen=True, kw_only=True):
    """From the executor, to a `ReadAdapter` of that number: the adapter, or why not."""

    number: int
    adapter: Adapter | None = None
    why: str = ""


class AdapterLost(Control, frozen=True, kw_only=True):
    """From an executor that was told its `Adapters`: this one cannot be read again."""

    adapter: Adapter
    why: str


# ── supervisor → member ──────────────────────────────────────────────────────────────────────────


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One actor as its peers see it: the generation of its state, where it is, and whether it can be reached."""

    role: Role
    replica: int
    generation: int
    endpoint: str
    up: bool


class Topology(Control, frozen=True, kw_only=True):
    """Who there is, as of `epoch`. `facts` are None until an executor has loaded."""

    epoch: int
    state: str
    members: list[Member]
    facts: Facts | None

    def member(self, role: Role) -> Member | None:
        return next((member for member in self.members if member.role is role), None)


class Go(Control, frozen=True):
    """All have acknowledged this epoch: links whose two ends are up may be used."""

    epoch: int


class ClientGone(Control, frozen=True):
    """To the tokenizer: this client left, died or was silent too long."""

    name: str


class Who(Control, frozen=True):
    """The supervisor does not (or no longer) know the sender: say Hello, and attach again."""


class Shutdown(Control, frozen=True):
    """Stop now. A client learns so that the daemon is gone."""

    why: str


class Adapters(Control, frozen=True):
    """To everyone, whenever it changes and before the first topology: which adapters have a name. What has none any
    more is still served to the requests that began with it."""

    adapters: list[Adapter]


class ReadAdapter(Control, frozen=True, kw_only=True):
    """To the executor: read this adapter and keep it. Answered with `AdapterRead`."""

    number: int
    name: str
    path: str


TAKEN, UNKNOWN, UNREADABLE, AWAY = "already_loaded", "model_not_found", "invalid_adapter", "service_unavailable"
"""Codes of `AdapterSet`."""


class AdapterSet(Control, frozen=True, kw_only=True):
    """To who asked: it is done and everyone was told, or `why` not; `code` is for machines."""

    ref: int
    why: str = ""
    code: str = ""


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `octavo status`. `generation` is that of its state, as in the topology."""

    role: str
    name: str
    pid: int | None
    generation: int
    state: str
    restarts: int
    progress_age_s: float | None
    stats: dict[str, int]


class Status(Control, frozen=True, kw_only=True):
    state: str
    epoch: int
    actors: list[ActorStatus]
    notes: list[str] = []
    """What whoever runs the service should know, a sentence each."""


ToSupervisor: TypeAlias = (
    Hello | Ready | Heartbeat | TopologyAck | Bye | QueueFull
    | AskStatus | SetPolicy | SetShadow | SetWeights | AskCache | CacheState
    | SetAdapter | AdapterRead | AdapterLost
)  # fmt: skip
ToMember: TypeAlias = (
    Topology | Go | ClientGone | Who | Shutdown | Status | SetPolicy | SetShadow | SetWeights | AskCache | CacheState
    | Adapters | ReadAdapter | AdapterSet
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_to_supervisor: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)
_to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)


def encode(message: Control) -> bytes:
    return _encoder.encode(message)


def decode_to_supervisor(frame: bytes) -> ToSupervisor:
    """`msgspec.DecodeError` or `ValidationError` if it is none."""
    return _to_supervisor.decode(frame)


def decode_to_member(frame: bytes) -> ToMember:
    """`msgspec.DecodeError` or `ValidationError` if it is none."""
    return _to_member.decode(frame)
