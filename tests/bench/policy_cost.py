"""What policies cost a step: `python tests/bench/policy_cost.py` prints tables, kept in tests/results.

The guard's own cost is that of asking through the host (checks, timing, and the note for the supervisor of who has the
word) less that of asking the policies themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from octavo.core.config.schema import PolicyConfig
from octavo.core.messages import Role
from octavo.core.plugins import installed
from octavo.core.policy import PolicyHost, copies, load_policies
from octavo.core.policy.load import load_policy
from octavo.core.policy.watch import AskedFile
from octavo.plugins.policykit.asking import fastest_us
from octavo.plugins.policykit.views import scene

SIZES = (16, 256, 1024)
STEP_US = 5000


def together(calls: tuple[Callable[..., object], ...], arguments: tuple[tuple[object, ...], ...]) -> float:
    """Time of one call of each, µs."""
    return sum(fastest_us(partial(call, *given), 200) for call, given in zip(calls, arguments, strict=True))


def guard_costs() -> list[str]:
    policies = load_policies(PolicyConfig())
    with TemporaryDirectory() as folder:
        watch = AskedFile(Path(folder), Role.SCHEDULER)
    host = PolicyHost(policies, clock=time.perf_counter_ns, budget_ns=10**9, watch=watch)
    rows = [
        "| running | asked directly µs | through the guard µs | guard, % of a 5 ms step | copies for shadows µs |",
        "|--:|--:|--:|--:|--:|",
    ]
    for n in SIZES:
        shown = scene("", min(n, 256), n)
        step, waiting, running = shown.step, shown.waiting, shown.running

        arguments = ((step, waiting, running), (step, running.known[:16], 0), (step, running))

        bare = (policies.batching.select, policies.chunking.split, policies.speculation.draft_lengths)
        direct = together(bare, arguments)
        guarded = together((host.select, host.split, host.draft_lengths), arguments)
        answers = (host.select(*arguments[0]), host.split(*arguments[1]), host.draft_lengths(*arguments[2]))
        copying = together(
            (copies.call,) * 3,
            tuple(
                (group, 1, "live", 1000, given, answer)
                for group, given, answer in zip(
                    ("batching", "chunking", "speculation"), arguments, answers, strict=True
                )
            ),
        )
        share = 100 * (guarded - direct) / STEP_US
        rows.append(f"| {n} | {direct:.0f} | {guarded:.0f} | {share:.1f} | {copying:.0f} |")
    return rows


def policy_costs() -> list[str]:
    rows = [f"| batching | {' | '.join(f'{n} running µs' for n in SIZES)} |", "|:--|--:|--:|--:|"]
    for name in installed("octavo.batching"):
        policy = load_policy("batching", name, {})
        spent = []
        for n in SIZES:
            shown = scene("", min(n, 256), n)
            spent.append(fastest_us(partial(policy.select, shown.step, shown.waiting, shown.running), 200))
        rows.append(f"| {name} | {' | '.join(f'{us:.0f}' for us in spent)} |")
    return rows


def main() -> None:
    text = "\n".join(
        ["# Cost of policies", "",
         "Fastest of 200 calls, with as many waiting as running, up to the window of 256.", "",
         "The default policies of one step, batching, chunking and speculation. Copies are made only while one runs",
         "in the shadow.", "", *guard_costs(), "",
         "A call of each batching policy:", "", *policy_costs(), ""]
    )  # fmt: skip
    print(text)
    (Path(__file__).parents[1] / "results" / "policy_cost.md").write_text(text)


if __name__ == "__main__":
    main()
