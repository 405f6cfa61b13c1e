"""Recording never holds an actor up, and a recording that was cut short can be gone on with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.core.config.load import ConfigError, load
from octavo.core.config.schema import TraceConfig
from octavo.core.machine import Outbound, Outputs
from octavo.core.messages import Cancel, Enqueue, Facts, Matched, PeerUp, Role, Sampling, Tick, col, encode
from octavo.core.trace.catalogue import RequestFinished
from octavo.core.trace.emit import Emitter
from octavo.core.trace.read import lines
from octavo.core.trace.record import Applied, Lost, Recorder, Started, digest, frames, record_path
from octavo.plugins.sim.traces import load as load_workload

S = 1_000_000_000
FACTS = Facts(model_id="m", context=9, vocab_size=9, block_size=1, total_blocks=9, block_bytes=1, cache_seed=b"s")
NOTHING = Outputs([], [])


@contextmanager
def recording(
    folder: Path, limit: int = 1000, most: int = 1 << 20, role: Role = Role.KV
) -> Iterator[tuple[Emitter, Recorder]]:
    with Emitter(folder, role, TraceConfig(), limit=limit) as emitter:
        recorder = Recorder(folder, role, emitter, most)
        yield emitter, recorder
    recorder.close()


def test_what_was_told_is_read_back_in_order(tmp_path: Path) -> None:
    with recording(tmp_path) as (_, recorder):
        recorder.started(3, FACTS)
        recorder.clock()
        recorder.clock()
        recorder.applied(5, PeerUp(Role.SCHEDULER, 3), NOTHING)
        recorder.applied(6, Tick(), NOTHING)
    started, first, second = frames(record_path(tmp_path, Role.KV))
    assert started == Started(3, FACTS)
    assert isinstance(first, Applied)
    assert isinstance(second, Applied)
    assert (first.now_ns, encode(first.body()), len(first.clock)) == (5, encode(PeerUp(Role.SCHEDULER, 3)), 2)
    assert (second.now_ns, encode(second.body()), second.clock) == (6, encode(Tick()), [])


def test_a_digest_tells_receivers_messages_and_wakeups_apart() -> None:
    def sent(role: Role = Role.SCHEDULER, cached: int = 4, wakeup: int | None = None) -> bytes:
        return digest(Outputs([Outbound(role, Matched(1, cached))], [], wakeup))

    assert sent() == sent()
    assert len({sent(), sent(role=Role.KV), sent(cached=5), sent(wakeup=1), digest(NOTHING)}) == 5


def test_a_full_queue_loses_frames_and_says_how_many(tmp_path: Path) -> None:
    """The writer is held up by a job of our own until the queue has overflowed."""
    held, hold = threading.Event(), threading.Event()

    def block() -> None:
        held.set()
        hold.wait(30)

    with recording(tmp_path, limit=3) as (emitter, recorder):
        assert emitter.defer(block)
        assert held.wait(30)
        for now in range(10):
            recorder.applied(now, Tick(), NOTHING)
        hold.set()
        while not any(isinstance(frame, Lost) for frame in frames(record_path(tmp_path, Role.KV))):
            recorder.applied(99, Tick(), NOTHING)
    told = list(frames(record_path(tmp_path, Role.KV)))
    assert [frame.now_ns for frame in told[:3] if isinstance(frame, Applied)] == [0, 1, 2]
    assert isinstance(told[3], Lost)
    assert told[3].messages >= 7


def test_a_recording_cut_by_a_death_is_gone_on_with(tmp_path: Path) -> None:
    path = record_path(tmp_path, Role.KV)
    with recording(tmp_path) as (_, recorder):
        recorder.applied(1, Tick(), NOTHING)
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert len(list(frames(path))) == 1
        with recording(tmp_path) as (_, recorder):
            recorder.applied(2, Tick(), NOTHING)
        assert [frame.now_ns for frame in frames(path) if isinstance(frame, Applied)] == [1, 2]


def test_a_recording_ends_at_its_bound_with_an_event_and_what_there_is_can_be_read(tmp_path: Path) -> None:
    most = 2000
    path = record_path(tmp_path, Role.KV)
    for _ in range(2):  # a successor does not begin anew
        with recording(tmp_path, most=most) as (emitter, recorder):
            for now in range(200):
                recorder.applied(now, Tick(), NOTHING)
            written = threading.Event()
            while not emitter.defer(written.set):
                pass
            assert written.wait(30)
            recorder.applied(200, Tick(), NOTHING)
        assert most - 100 < path.stat().st_size <= most
    told = [frame.now_ns for frame in frames(path) if isinstance(frame, Applied)]
    assert told == list(range(len(told)))
    ended = [event["bytes"] for event in lines(tmp_path) if event["event"] == "record.ended"]
    assert ended == 2 * [path.stat().st_size]


def test_a_full_disk_ends_a_recording_at_its_last_whole_frame(tmp_path: Path) -> None:
    """The disk takes three whole frames and a half."""
    with recording(tmp_path) as (_, recorder):
        file = recorder._file
        path = record_path(tmp_path, Role.KV)

        class Full:
            name, truncate = file.name, file.truncate

            def write(self, frame: bytes) -> int:
                return file.write(frame[: max(0, 7 * len(frame) // 2 - path.stat().st_size)])

            close = file.close

        recorder._file = Full()  # type: ignore[assignment]
        for now in range(10):
            recorder.applied(now, Tick(), NOTHING)
    told = [frame.now_ns for frame in frames(path) if isinstance(frame, Applied)]
    assert told == [0, 1, 2]
    sizes = {path.stat().st_size}
    with recording(tmp_path):
        sizes.add(path.stat().st_size)
    assert len(sizes) == 1, "nothing is left of a fourth"


def test_a_recorded_run_is_a_workload_with_its_choices_stops_and_cancels(tmp_path: Path) -> None:
    def asked(name: str, at_ns: int, n: int = 1) -> Enqueue:
        return Enqueue(
            handle=at_ns, request_id=name, attempt=0, ids=col([1, 2, 3]), n=n, sampling=Sampling(temperature=0.0),
            max_tokens=50, stop_ids=[], tenant="a", priority=2, deadline_ns=at_ns + 4 * S, namespace=b"",
            received_ns=at_ns, trace_id="", delivered=[], finished=[],
        )  # fmt: skip

    def ended(name: str, choice: int, finish: str, tokens: int) -> RequestFinished:
        return RequestFinished(
            request_id=name, choice=choice, finish=finish, detail="", prompt_tokens=3, output_tokens=tokens, cached=0,
            dropped=0, preemptions=0, since_queued_ns=0,
        )  # fmt: skip

    with recording(tmp_path, role=Role.SCHEDULER) as (emitter, recorder):
        recorder.applied(S, asked("two", S, n=2), NOTHING)
        recorder.applied(2 * S, asked("gone", 2 * S), NOTHING)
        recorder.applied(5 * S, Cancel("gone"), NOTHING)
        for event in (ended("two", 0, "length", 50), ended("two", 1, "stop", 7), ended("gone", 0, "cancelled", 9)):
            emitter.emit(event)
    two, gone = load_workload(tmp_path)
    assert (two.start_s, two.tenant, two.priority, two.deadline_s) == (0.0, "a", 2, 4.0)
    (turn,) = two.turns
    assert (turn.name, turn.outputs, turn.max_tokens, turn.cancel_s) == ("two", (50, 7), 50, None)
    (turn,) = gone.turns
    assert (gone.start_s, turn.outputs, turn.cancel_s) == (1.0, (50,), 3.0)


def test_recording_needs_the_trace() -> None:
    with pytest.raises(ConfigError, match=r"trace.record .*trace.enabled"):
        load(None, {}, ["trace.record=true", "trace.enabled=false"])
