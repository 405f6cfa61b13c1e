"""Links: who may be spoken to, and whose frames are believed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.control import READY, Member, Topology
from octavo.core.links import FENCED, Links
from octavo.core.messages import PROTOCOL_VERSION, Header, PeerDown, PeerUp, Role


@dataclass
class World:
    """Builds topologies; `down` roles have no process."""

    epoch: int = 0
    generations: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(sorted(FENCED), 1))
    down: set[Role] = field(default_factory=set)

    def topology(self) -> Topology:
        self.epoch += 1
        members = [
            Member(role=role, replica=0, generation=g, endpoint=f"ipc://{role.name}.{g}", up=role not in self.down)
            for role, g in self.generations.items()
        ]
        return Topology(epoch=self.epoch, state=READY, members=members, facts=None)


def frame(source: Role, source_gen: int, dest_gen: int, version: int = PROTOCOL_VERSION) -> Header:
    return Header(version, 0, source, source_gen, dest_gen, 1, 0)


def told(news: list[PeerDown] | list[PeerUp]) -> list[tuple[str, Role]]:
    return [(type(peer).__name__, peer.role) for peer in news]


def linked(role: Role, world: World) -> Links:
    links = Links(role, 1)
    links.announce(world.topology())
    links.go(world.epoch)
    return links


def test_nothing_is_up_before_go_and_the_far_end_comes_first() -> None:
    world, links = World(), Links(Role.SCHEDULER, 1)
    assert links.announce(world.topology()) == []
    assert links.live(Role.KV) is None
    assert told(links.go(world.epoch)) == [
        ("PeerUp", Role.EXECUTOR),
        ("PeerUp", Role.KV),
        ("PeerUp", Role.TOKENIZER),
    ]


def test_go_of_another_epoch_changes_nothing() -> None:
    world, links = World(), Links(Role.SCHEDULER, 1)
    links.announce(world.topology())
    links.announce(world.topology())
    assert links.go(world.epoch - 1) == []
    assert links.go(world.epoch) != []
    assert links.go(world.epoch) == []


def test_a_dead_executor_takes_the_kv_state_with_it() -> None:
    world = World()
    links = linked(Role.SCHEDULER, world)
    world.generations |= {Role.EXECUTOR: 2, Role.KV: 2}
    world.down = {Role.EXECUTOR, Role.KV}
    assert told(links.announce(world.topology())) == [("PeerDown", Role.KV), ("PeerDown", Role.EXECUTOR)]
    assert links.go(world.epoch) == []
    world.down = set()
    assert links.announce(world.topology()) == []
    assert told(links.go(world.epoch)) == [("PeerUp", Role.EXECUTOR), ("PeerUp", Role.KV)]
    assert links.refusal(frame(Role.KV, 1, 1)) is not None
    assert links.refusal(frame(Role.KV, 2, 1)) is None


def test_a_new_generation_of_ones_own_state_cuts_every_link() -> None:
    world = World()
    links = linked(Role.KV, world)
    world.generations |= {Role.EXECUTOR: 2, Role.KV: 2}
    world.down = {Role.EXECUTOR, Role.KV}
    assert {peer.role for peer in links.announce(world.topology())} == FENCED - {Role.KV}
    assert links.generation == 2
    assert links.go(world.epoch) == [], "its own end is not up"
    world.down = set()
    links.announce(world.topology())
    assert {peer.role for peer in links.go(world.epoch)} == FENCED - {Role.KV}


def test_a_change_elsewhere_leaves_a_link_alone() -> None:
    world = World()
    links = linked(Role.EXECUTOR, world)
    world.generations[Role.TOKENIZER] = 2
    assert told(links.announce(world.topology())) == [("PeerDown", Role.TOKENIZER)]
    assert links.refusal(frame(Role.KV, 1, 1)) is None


def test_a_frame_of_the_announced_generation_proves_that_go_was_given() -> None:
    world = World()
    links = linked(Role.KV, world)
    world.generations[Role.SCHEDULER] = 2
    links.announce(world.topology())
    fresh = frame(Role.SCHEDULER, 2, 1)
    proof = links.proves_go(fresh)
    assert proof is not None
    assert told(links.go(proof.epoch)) == [("PeerUp", Role.SCHEDULER)]
    assert links.refusal(fresh) is None


@pytest.mark.parametrize("stale", [frame(Role.SCHEDULER, 1, 1), frame(Role.SCHEDULER, 2, 7)])
def test_a_frame_of_any_other_generation_proves_nothing(stale: Header) -> None:
    world = World()
    links = linked(Role.KV, world)
    world.generations[Role.SCHEDULER] = 2
    links.announce(world.topology())
    assert links.proves_go(stale) is None
    assert links.refusal(stale) is not None


def test_an_answer_may_go_to_the_generation_that_asked_and_to_no_other() -> None:
    world = World()
    links = linked(Role.EXECUTOR, world)
    world.generations[Role.SCHEDULER] = 2
    links.announce(world.topology())
    assert links.reach(Role.SCHEDULER) is None
    answered = links.reach(Role.SCHEDULER, 2)
    assert answered is not None
    assert answered.generation == 2
    assert links.reach(Role.SCHEDULER, 1) is None


def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    links = linked(Role.KV, World())
    why = links.refusal(frame(Role.SCHEDULER, 1, 1, version=99))
    assert why is not None
    assert "99" in why
    assert str(PROTOCOL_VERSION) in why


def test_clients_are_not_fenced_by_their_generation_but_know_that_of_the_receiver() -> None:
    world = World()
    world.generations[Role.TOKENIZER] = 3
    links = linked(Role.TOKENIZER, world)
    assert links.refusal(frame(Role.CLIENT, 0, 3)) is None
    assert links.refusal(frame(Role.CLIENT, 0, 2)) is not None


CHANGES = st.lists(
    st.tuples(st.sets(st.sampled_from(sorted(FENCED))), st.sets(st.sampled_from(sorted(FENCED))), st.booleans()),
    max_size=8,
)


@given(st.sampled_from(sorted(FENCED)), CHANGES)
def test_news_alternate_and_a_frame_is_believed_only_between_two_ends_that_are_up(
    role: Role, changes: list[tuple[set[Role], set[Role], bool]]
) -> None:
    """Whatever dies in whatever order: each peer goes up and down in turn, and what is believed is current."""
    world = World()
    links = Links(role, 1)
    up: set[Role] = set()
    for bumped, down, go in changes:
        for lost in bumped:
            world.generations[lost] += 1
        world.down = down
        for gone in links.announce(world.topology()):
            up.remove(gone.role)
        if go:
            for come in links.go(world.epoch):
                assert come.role not in up
                up.add(come.role)
        own = world.generations[role]
        for peer in FENCED - {role}:
            believed = links.refusal(frame(peer, world.generations[peer], own)) is None
            assert believed == (peer in up)
            assert not (believed and (peer in down or role in down))
            assert links.refusal(frame(peer, world.generations[peer] - 1, own)) is not None
