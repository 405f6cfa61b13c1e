"""Supervision as data: the actors of the service, and what is lost with each.

State is what has generations, not processes: an executor's KV bytes are described by the KV-manager's tables,
so when an executor dies the KV-manager's state is lost too, though its process lives on.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.messages import Role


class Child(NamedTuple):
    """`bumps`: whose state is lost when this process dies. `needs`: who must be up for this one to be of use."""

    role: Role
    bumps: tuple[Role, ...]
    needs: tuple[Role, ...] = ()


CHILDREN = {
    child.role: child
    for child in (
        Child(Role.EXECUTOR, bumps=(Role.EXECUTOR, Role.KV)),
        Child(Role.KV, bumps=(Role.KV,), needs=(Role.EXECUTOR,)),
        Child(Role.SCHEDULER, bumps=(Role.SCHEDULER,)),
        Child(Role.TOKENIZER, bumps=(Role.TOKENIZER,)),
        Child(Role.GATEWAY, bumps=(Role.GATEWAY,)),
    )
}
"""In the order they are started: the executor takes longest."""

MEMBERS = (Role.EXECUTOR, Role.KV, Role.SCHEDULER, Role.TOKENIZER)
"""Those on the data plane: they are in the topology, and a change waits until each has acknowledged it."""
