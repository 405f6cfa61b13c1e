"""The process in which a candidate policy answers beside the live one, on copies of its calls and without effect.

    python -m octavo.core.policy.shadow batching mine --options '{}' --run DIR --parent 4711

It leaves its findings in `shadow-GROUP.json` of the run folder (see `findings`), which `octavo policy shadow` reads:
also while the candidate hangs, and after its death. Its parent is the supervisor, which never starts it a second time.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import zmq

from octavo.core import wire
from octavo.core.config.schema import PolicyConfig
from octavo.core.plugins import PluginError
from octavo.core.policy import PolicyHost, copies, load_policies
from octavo.core.policy.compare import compare
from octavo.core.policy.copies import Copy, Drafted, Ranked, Selected, Split, Told, Victims
from octavo.core.policy.findings import FIRST, REPORT_S, Findings, Seen, write
from octavo.core.policy.load import load_policy
from octavo.core.policy.tap import QUEUE
from octavo.core.policy.watch import Watch
from octavo.core.process import tie_to_parent
from octavo.core.rundir import read_config
from octavo.core.trace.catalogue import PolicyRejected, PolicyTripped

LATEST = 10_000
"""Calls whose times are kept."""
NO_LIMIT_NS = 10**15
"""A shadow may be slow: it is told, but has no consequence."""


class _Times(Watch):
    """How long the candidate took for each call; and since when it has been at it."""

    def __init__(self) -> None:
        self.spent_ns: deque[int] = deque(maxlen=LATEST)
        self.since_ns: int | None = None

    def begins(self, group: str) -> None:
        self.since_ns = time.monotonic_ns()

    def ends(self) -> None:
        self.since_ns = None

    def answered(self, group: str, arguments: tuple[Any, ...], answer: Any, spent_ns: int) -> None:
        self.spent_ns.append(spent_ns)


class Shadow:
    """Asks the candidate what the live policy was asked, and counts. One host checks its answers, as one checks the
    live ones'. `take` from one thread; `findings` from any."""

    def __init__(self, group: str, name: str, options: Mapping[str, Any], config: PolicyConfig) -> None:
        """`PluginError` if the policy cannot be had."""
        self._times = _Times()
        policies = load_policies(PolicyConfig())
        made = {group: load_policy(group, name, options, config.weights), "names": {**policies.names, group: name}}
        self._host = PolicyHost(
            replace(policies, **made), clock=time.perf_counter_ns, budget_ns=NO_LIMIT_NS, watch=self._times
        )
        self._findings = Findings(
            group=group,
            policy=name,
            options=dict(options),
            budget_us=config.call_budget_us,
            started=time.time(),
        )
        self._live_ns: deque[int] = deque(maxlen=LATEST)
        self._kinds: Counter[str] = Counter()
        self._last = 0

    def take(self, copy: Copy) -> None:
        if isinstance(copy, Told):
            self._host.observe(copy.observed)
            return
        found = self._findings
        if found.tripped:
            return
        if self._last:
            found.dropped += copy.number - self._last - 1
        self._last = copy.number
        found.calls += 1
        found.beside = copy.policy
        self._live_ns.append(copy.spent_ns)
        answer = self._ask(copy)
        events = self._host.drain_events()
        for event in events:
            if isinstance(event, PolicyRejected):
                found.invalid += 1
                if len(found.first_invalid) < FIRST:
                    found.first_invalid.append(event.why)
            elif isinstance(event, PolicyTripped):
                found.tripped = event.why
        if events:
            return
        differences = compare(copy, answer)
        found.different += bool(differences)
        for one in differences:
            self._kinds[one.kind] += 1
            if self._kinds[one.kind] <= FIRST:
                found.first.append(Seen(kind=one.kind, asked=one.asked, live=one.live, mine=one.mine))

    def _ask(self, call: Copy) -> object:
        host = self._host
        match call:
            case Selected():
                return host.select(call.step, call.waiting, call.running)
            case Split():
                return host.split(call.step, call.remaining, call.decode_tokens)
            case Victims():
                return host.victims(call.step, call.need, call.candidates)
            case Ranked():
                return host.rank(call.need, call.leaves)
            case Drafted():
                return host.draft_lengths(call.step, call.running)
            case Told():
                raise TypeError("nobody answers what is only told")

    def findings(self) -> Findings:
        since_ns, found = self._times.since_ns, self._findings
        found.updated = time.time()
        found.asking_s = 0.0 if since_ns is None else (time.monotonic_ns() - since_ns) / 1e9
        found.kinds = dict(self._kinds)
        found.spent_us, found.live_us = _quantiles_us(self._times.spent_ns), _quantiles_us(self._live_ns)
        return found


def _quantiles_us(spent_ns: deque[int]) -> tuple[float, float, float]:
    """Median, 99th percentile and most."""
    latest = sorted(list(spent_ns))  # noqa: C414 - a copy in one go: the other thread appends
    if not latest:
        return (0.0, 0.0, 0.0)
    return (latest[len(latest) // 2] / 1e3, latest[len(latest) * 99 // 100] / 1e3, latest[-1] / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="octavo.core.policy.shadow")
    parser.add_argument("group")
    parser.add_argument("name")
    parser.add_argument("--options", type=msgspec.json.decode, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    tie_to_parent(arguments.parent)
    setproctitle.setproctitle(f"octavo: shadow of {arguments.group}")
    run_dir: Path = arguments.run
    try:
        shadow = Shadow(arguments.group, arguments.name, arguments.options, read_config(run_dir).policies)
    except PluginError as error:
        raise SystemExit(f"octavo: {error}") from None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mailbox = wire.Mailbox(context, wire.shadow_endpoint(run_dir, arguments.group), QUEUE)
    threading.Thread(target=_report, args=(run_dir, shadow), daemon=True).start()
    while True:
        shadow.take(copies.decode(mailbox.socket.recv()))


def _report(run_dir: Path, shadow: Shadow) -> None:
    """In a thread of its own, so that it goes on while the candidate hangs. What finds the disk full is in the next."""
    while True:
        with suppress(OSError):
            write(run_dir, shadow.findings())
        time.sleep(REPORT_S)


if __name__ == "__main__":
    main()
