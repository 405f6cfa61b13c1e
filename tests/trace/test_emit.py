"""Events: written as lines by a thread, never in the emitter's way, and read back as one request's life."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from octavo.core.config.schema import TraceConfig
from octavo.core.messages import Role
from octavo.core.trace import emit
from octavo.core.trace.catalogue import (
    Event,
    RequestCancelled,
    RequestFailed,
    RequestFirstToken,
    RequestTokenized,
    StepBound,
    StepExecuted,
    WireDropped,
)
from octavo.core.trace.emit import Emitter, trace_path
from octavo.core.trace.show import describe, lines, request_life, show

STEP = StepExecuted(
    step=3, rows=1, tokens=1, started_ns=2, execute_ns=5, prefill_tokens=0, decodes=1, attention=9, kv_tokens=9
)


def write(run_dir: Path, role: Role, *events: Event, config: TraceConfig | None = None) -> None:
    with Emitter(run_dir, role, config or TraceConfig(), generation=4) as emitter:
        for event in events:
            emitter.emit(event)


def test_a_line_has_the_common_fields_and_the_events_own(tmp_path: Path) -> None:
    write(tmp_path, Role.EXECUTOR, STEP)
    (line,) = trace_path(tmp_path, Role.EXECUTOR, 0).read_bytes().splitlines()
    fields = msgspec.json.decode(line)
    assert fields.pop("ts_ns") > 0
    assert fields.pop("spent_ns") == 0
    assert fields == {"role": "executor", "replica": 0, "generation": 4, **msgspec.to_builtins(STEP)}


def test_a_restarted_actor_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path, Role.KV, STEP)
    assert len(list(lines(tmp_path))) == 2


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    failed = RequestFailed(request_id="r", code="c", reason="x")
    bound = StepBound(
        step=1, allocated=0, free=0, evictable=0, evicted=0, copies=0, swapped_in=0, skipped=0, policy_ns=0
    )
    write(tmp_path, Role.KV, STEP, bound, failed, config=TraceConfig(steps=False))
    assert [event["event"] for event in lines(tmp_path)] == ["request.failed"]
    write(tmp_path, Role.EXECUTOR, failed, config=TraceConfig(enabled=False))
    assert not trace_path(tmp_path, Role.EXECUTOR, 0).exists()


def test_a_full_queue_drops_events_counts_them_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held at its first event until the emitter is done; emitting goes on all the same."""
    held, release = threading.Event(), threading.Event()
    encode = emit.encode

    def slow(event: Event) -> bytes:
        held.set()
        assert release.wait(30)
        return encode(event)

    monkeypatch.setattr(emit, "encode", slow)
    with Emitter(tmp_path, Role.KV, TraceConfig(), limit=10) as emitter:
        emitter.emit(STEP)
        assert held.wait(30)
        for _ in range(15):
            emitter.emit(STEP)
        release.set()
    events = list(lines(tmp_path))
    dropped = [event for event in events if event["event"] == "wire.dropped"]
    assert [event["why"] for event in dropped] == ["5 events: the writer's queue of 10 was full"]
    assert len(events) - len(dropped) == 1 + 10


ON_A_FULL_DISK = """
import io, resource, sys, time
from pathlib import Path
from octavo.core.config.schema import TraceConfig
from octavo.core.messages import Role
from octavo.core.trace.catalogue import WireDropped
from octavo.core.trace.emit import Emitter
from octavo.core.trace.log import configure_log

sys.stderr = io.StringIO()
configure_log("kv", "info")
path, room = Path(sys.argv[1]), int(sys.argv[2])
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
with Emitter(path, Role.KV, TraceConfig()) as emitter:
    for number in range(20):
        emitter.emit(WireDropped(peer="x", why=str(number)))
    while "events are lost" not in sys.stderr.getvalue():
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    emitter.emit(WireDropped(peer="x", why="heard again"))
print(sys.stderr.getvalue())
"""


def test_a_full_disk_costs_the_events_that_find_no_room_and_no_others(tmp_path: Path) -> None:
    """A bound of the file's size stands for the disk's: writes are cut and refused in the same way."""
    ran = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, tmp_path, "1000"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("events are lost") == 1
    whys = [event["why"] for event in lines(tmp_path)]
    before = [why for why in whys if why.isdigit()]
    assert before == [str(number) for number in range(len(before))]
    assert 0 < len(before) < 20
    confessed, after = whys[len(before) :]
    assert re.fullmatch(r"up to (1\d|20) events: they could not be written", confessed)
    assert after == "heard again"


UNHEARD = """
from octavo.core.trace.log import configure_log, log

configure_log("kv", "info")
for word in ("info", "warning", "error"):
    getattr(log(), word)("who hears this?")
print("goes on")
"""


def test_a_log_that_cannot_be_written_ends_nobody() -> None:
    """Not a supervisor, and not the thread that would go on with the trace once there is room."""
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([sys.executable, "-c", UNHEARD], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert ran.stdout == b"goes on\n"


def test_a_requests_life_is_told_over_all_files_in_order_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        Emitter(tmp_path, Role.TOKENIZER, TraceConfig()) as tokenizer,
        Emitter(tmp_path, Role.SCHEDULER, TraceConfig()) as scheduler,
    ):
        tokenizer.emit(RequestTokenized(request_id="mine", prompt_tokens=5, max_tokens=7, n=1, namespace=""))
        scheduler.emit(RequestFirstToken(request_id="mine", choice=0, step=2, since_queued_ns=1_500_000))
        scheduler.emit(RequestCancelled(request_id="other", why="test"))
        tokenizer.emit(RequestCancelled(request_id="mine", why="by the client"))
    told = describe(request_life(tmp_path, "mine"))
    assert [line.split()[3] for line in told] == ["tokenized", "first_token", "cancelled"]
    assert told[0].split()[0] == "+0.00"
    assert "since_queued=1.50ms" in told[1]
    assert show("mine", tmp_path, events=True) == 0
    assert capsys.readouterr().out.splitlines() == told
    assert show("nobody", tmp_path, events=True) == 1
    assert "nobody" in capsys.readouterr().err


def test_a_line_that_death_cut_short_is_left_out_and_spoils_no_other(tmp_path: Path) -> None:
    write(tmp_path, Role.KV, STEP, WireDropped(peer="x", why="y"))
    path = trace_path(tmp_path, Role.KV, 0)
    path.write_bytes(path.read_bytes()[:-10])
    assert [event["event"] for event in lines(tmp_path)] == ["step.executed"]
    write(tmp_path, Role.KV, STEP)
    assert [event["event"] for event in lines(tmp_path)] == ["step.executed", "step.executed"]
