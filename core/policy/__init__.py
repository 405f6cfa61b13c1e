"""Policies as the kernel uses them: found and made (`load`), asked and checked (`host`), told what happened
(`observations`), swapped while it runs; and what stands in for one whose answer is not valid (`rules`).

Who looks on is in `watch`. A shadow is a process of its own (`shadow`) that gets copies of calls (`tap`, `copies`),
asks another policy the same, and tells where its answers differ (`compare`, `findings`)."""

from octavo.core.policy.host import PolicyHost
from octavo.core.policy.load import Policies, load_policies
from octavo.core.policy.rules import split_in_order

__all__ = ["Policies", "PolicyHost", "load_policies", "split_in_order"]
