"""A shadow answers beside the live policy, tells how it differs, and whatever it does the engine goes on as before."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from msgspec.structs import replace as replace_fields

from octavo.core.config.schema import PolicyConfig
from octavo.core.policy import PolicyHost, command, findings, load_policies
from octavo.core.policy import shadow as shadow_process
from octavo.core.policy.copies import CALLS, Copy, call, decode
from octavo.core.policy.findings import Findings, read_all, text
from octavo.core.policy.load import METHODS
from octavo.core.policy.shadow import Shadow
from octavo.core.policy.watch import Watch
from octavo.plugins.policykit.asking import columns
from octavo.plugins.policykit.views import scene, scenes, some_leaves, splits
from octavo.policies.contract import Running, Selection, Step, Waiting
from tests.policies.hostile import installed
from tests.policies.streams import TOKENS, answers
from tests.processes.daemon import Daemon, daemon, eventually, is_running

IN_ORDER = Selection(np.arange(20, dtype=np.int32))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("hostile")
        patch.syspath_prepend(folder)
        for name, value in installed(folder).items():
            patch.setenv(name, value)
        with daemon("scheduler.max_sequences=3", "kv.tokens=512") as service:
            service.wait_ready()
            yield service


@pytest.fixture(scope="module")
def expected(service: Daemon) -> dict[int, str]:
    return anyio.run(answers, service.run_dir)


def shadow(service: Daemon, setting: str | None = None) -> str:
    """What the command prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert command.shadow(setting, (), service.run_dir) == 0
    return printed.getvalue()


def found(service: Daemon, group: str, what: Callable[[Findings], object] = lambda one: True) -> Findings:
    """Of the shadow of this group, once they are so."""

    def probe() -> Findings | None:
        return next((one for one in read_all(service.run_dir) if one.group == group and what(one)), None)

    return eventually(f"findings of {group}", probe)


def pids(service: Daemon) -> dict[str, int]:
    return {role: pid for role, pid in service.pids().items() if role != "supervisor"}


def test_it_tells_where_and_how_it_would_have_decided_differently(service: Daemon, expected: dict[int, str]) -> None:
    words = ("policy", "shadow", "batching=newest", "--run", str(service.run_dir))
    told = subprocess.run([sys.executable, "-m", "octavo", *words], capture_output=True, timeout=60, check=True)
    assert b"answers beside the live batching policy" in told.stdout
    shadow(service, "chunking=whole")
    assert anyio.run(answers, service.run_dir) == expected
    report = shadow(service)  # at once: what came last is in it, too
    one = found(service, "batching")
    assert one.calls > 50
    assert f"{one.calls}\n" in report
    assert one.beside == "fcfs"
    assert 0 < one.different <= one.calls
    assert set(one.kinds) <= {"admits others", "the same in another order"}
    assert min(one.spent_us) > 0
    assert "batching: newest in the shadow of fcfs" in report
    assert "first differences (admits others)" in report
    assert f"up to {TOKENS} to go" in report, "the rows' key columns"
    assert found(service, "chunking", lambda one: one.calls).different == 0

    # A scheduler that starts anew sends copies as the last one did.
    service.wait_replaced("scheduler", service.kill("scheduler"))
    assert anyio.run(answers, service.run_dir) == expected
    found(service, "batching", lambda again: again.calls > one.calls)
    shadow(service, "off")
    eventually("they have ended", lambda: not any(one.running for one in read_all(service.run_dir)))
    assert not service.events("shadow.ended"), "of itself"


def test_whatever_shadows_do_the_engine_goes_on(service: Daemon, expected: dict[int, str]) -> None:
    """One never returns, one takes its process with it, one lets not even its own threads run, one is killed."""
    before = pids(service)
    settings = {"batching": "loops", "chunking": "exits", "eviction": "hogs", "preemption": "lifo"}
    for group, name in settings.items():
        shadow(service, f"{group}={name}")
    hung = [found(service, group).pid for group in ("batching", "eviction")]
    killed = found(service, "preemption").pid

    async def killed_under_streams() -> dict[int, str]:
        os.kill(killed, signal.SIGKILL)
        return await answers(service.run_dir)

    assert anyio.run(killed_under_streams) == expected
    assert anyio.run(answers, service.run_dir) == expected, "by now queues are full"
    eventually("two have ended", lambda: len(service.events("shadow.ended")) == 2)
    ended = {(event["group"], event["code"]) for event in service.events("shadow.ended")}
    assert ended == {("preemption", -signal.SIGKILL), ("chunking", 7)}
    eventually("one is told to hang", lambda: "has not answered for" in shadow(service))
    eventually("so is the other", lambda: "it hangs and lets no other thread run" in shadow(service))
    assert pids(service) == before
    shadow(service, "off")
    eventually("they have ended", lambda: not any(is_running(pid) for pid in hung))


# ── without processes ────────────────────────────────────────────────────────────────────────────


class Raises:
    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        raise RuntimeError("not today")


def copy_of(number: int, answer: Selection, *, free_slots: int = 2) -> Copy:
    shown = scene("", 20, 12)
    step = replace(shown.step, free_slots=free_slots)
    return decode(call("batching", number, "fcfs", 5000, (step, shown.waiting, shown.running), answer))


def test_one_that_raises_is_told_and_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_process, "load_policy", lambda *_: Raises())
    one = Shadow("batching", "mine", {}, PolicyConfig())
    for number in range(1, 10):
        one.take(copy_of(number, IN_ORDER))
    assert one.findings().invalid == one.findings().calls == 3
    assert "RuntimeError: not today" in text(one.findings())
    assert "it would have been switched off" in text(one.findings())


def test_a_full_disk_ends_no_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there stands for it."""
    run_dir = tmp_path / "run"
    shadow = Shadow("batching", "newest", {}, PolicyConfig())

    def rest(_: float) -> None:
        if run_dir.is_dir():
            raise StopIteration
        run_dir.mkdir()

    monkeypatch.setattr("time.sleep", rest)
    with pytest.raises(StopIteration):
        shadow_process._report(run_dir, shadow)
    assert [one.policy for one in read_all(run_dir)] == ["newest"]


def test_what_the_one_before_it_reports_while_it_ends_is_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "BEGIN_S", 0.05)
    asked = time.time()
    told = Findings(group="batching", policy="newest", options={}, budget_us=1, started=asked - 1)
    findings.write(tmp_path, told)
    assert not findings.begun(tmp_path, "batching", asked)
    findings.write(tmp_path, replace_fields(told, started=asked + 1))
    assert findings.begun(tmp_path, "batching", asked)


def test_what_is_missing_is_counted_and_only_what_matters_differs() -> None:
    one = Shadow("batching", "fcfs", {}, PolicyConfig())
    other = IN_ORDER.admit.copy()
    other[[0, 1, 2, 3]] = [1, 0, 3, 2]
    for number, admit in ((7, IN_ORDER.admit), (8, other), (12, np.flip(other)), (13, np.r_[:2, 19:1:-1])):
        one.take(copy_of(number, Selection(admit.astype(np.int32))))
    found = one.findings()
    assert (found.calls, found.dropped, found.different) == (4, 3, 2)
    assert found.kinds == {"the same in another order": 1, "admits others": 1}
    one.take(copy_of(14, Selection(np.flip(other)), free_slots=0))
    assert one.findings().different == 2, "nobody could be admitted"


@pytest.mark.parametrize("group", METHODS)
def test_copies_of_all_calls_come_out_as_they_went_in(group: str) -> None:
    """And a policy in its own shadow differs nowhere."""
    copied: list[Copy] = []

    class Copying(Watch):
        def answered(self, group: str, arguments: tuple[object, ...], answer: object, spent_ns: int) -> None:
            copied.append(decode(call(group, len(copied) + 1, "live", spent_ns, arguments, answer)))
            again = copied[-1]
            assert isinstance(again, CALLS[group])
            names = again.__struct_fields__[3:]
            for name, was in zip(names, (*arguments, answer), strict=True):
                for a, b in zip(columns((getattr(again, name),)), columns((was,)), strict=True):
                    assert a.dtype == b.dtype
                    assert np.array_equal(a, b)
                    assert not a.flags.writeable

    host = PolicyHost(load_policies(PolicyConfig()), watch=Copying())
    for shown in scenes():
        if group == "batching":
            host.select(shown.step, shown.waiting, shown.running)
        if group == "preemption":
            host.victims(shown.step, 5, shown.running)
        if group == "speculation":
            host.draft_lengths(shown.step, shown.running)
    for _, step, left, decodes in splits() if group == "chunking" else ():
        host.split(step, left, decodes)
    for count in (0, 1, 50) if group == "eviction" else ():
        host.rank(min(count, 5), some_leaves(count))
    one = Shadow(group, host.names[group], {}, PolicyConfig())
    for copy in copied:
        one.take(copy)
    assert one.findings().calls == len(copied) > 2
    assert one.findings().different == one.findings().invalid == 0
