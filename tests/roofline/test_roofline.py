"""What bounds a step: against steps whose work and time are made up, and a real run of the real model."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from octavo.core.trace.catalogue import (
    ActorReady,
    Event,
    MemoryMeasured,
    RequestBlocked,
    RequestFinished,
    RequestQueued,
    StepExecuted,
    StepPlanned,
)
from octavo.core.trace.read import Line
from octavo.core.trace.run import Run
from octavo.plugins.memory.shape import from_config
from octavo.plugins.roofline import draw
from octavo.plugins.roofline import machine as machines
from octavo.plugins.roofline.bound import KINDS, Costs, StepPoint, costs, points, ran_on, work
from octavo.plugins.roofline.command import command
from octavo.plugins.roofline.machine import Machine
from octavo.plugins.sim.calibrate import command as calibrate
from tests.processes.daemon import daemon

MS = 1_000_000
MACHINE = Machine(flops=1e9, bytes=1e8, cpus=1, source="made up")
"""Ridge at 10 operations a byte."""
COSTS = Costs(body=100_000, head=0, weight_bytes=1.0, attention_flops=0, kv_bytes=0.0)
"""A step reads 100 kB (1 ms), and computes 0.2 ms a token: the ridge is at five tokens."""


def step(
    number: int, at_ms: float, took_ms: float, *, prefill: int = 0, decodes: int = 0, opens: int = 0
) -> list[Line]:
    planned = StepPlanned(
        step=number, sequences=1, prefill_tokens=prefill, decode_tokens=decodes, opens=opens, forks=0, releases=0,
        waiting=0, running=1, credit=9, policy_ns=0, open_ids=[],
    )  # fmt: skip
    executed = StepExecuted(
        step=number, rows=1, tokens=decodes, started_ns=int(at_ms * MS), execute_ns=int(took_ms * MS),
        prefill_tokens=prefill, decodes=decodes, attention=7, kv_tokens=9,
    )  # fmt: skip
    return [line(at_ms - 0.1, planned, "scheduler"), line(at_ms + took_ms, executed, "executor")]


def line(at_ms: float, event: Event, role: str = "scheduler") -> Line:
    return Line(int(at_ms * MS), 0, role, 1, event)


def bounds(*lines: list[Line]) -> list[str]:
    run = Run(sorted((one for many in lines for one in many), key=lambda one: one.ts_ns))
    return [point.bound for point in points(run, COSTS, MACHINE)]


def test_few_tokens_are_bound_by_bandwidth_and_many_by_arithmetic() -> None:
    assert bounds(step(1, 1, 2, decodes=4, opens=4), step(2, 3, 2, prefill=6)) == ["bandwidth", "compute"]


def test_an_executor_that_waits_for_longer_than_it_computes_is_bound_by_scheduling() -> None:
    assert bounds(step(1, 1, 2, decodes=1), step(2, 6, 2, decodes=1))[1] == "scheduling"
    assert bounds(step(1, 1, 2, decodes=1), step(2, 4, 2, decodes=1))[1] == "bandwidth"
    # Nobody was running: there was nothing to do.
    assert bounds(step(1, 1, 2, decodes=1), step(2, 60, 2, prefill=1, opens=1))[1] == "bandwidth"


@pytest.mark.parametrize(("resource", "told"), [("slots", "capacity"), ("blocks", "capacity"), ("match", "bandwidth")])
def test_a_batch_that_could_not_grow_is_bound_by_capacity(resource: str, told: str) -> None:
    waits: list[Line] = [
        line(0, RequestQueued(request_id="r", trace_id="", attempt=0, prompt_tokens=1, n=1, ahead=0)),
        line(0.5, RequestBlocked(request_id="r", choice=0, step=0, resource=resource, need=1, have=0)),
        line(9, RequestFinished(request_id="r", choice=0, finish="length", detail="", prompt_tokens=1, output_tokens=1,
                                cached=0, dropped=0, preemptions=0, since_queued_ns=0)),
    ]  # fmt: skip
    assert bounds(waits, step(1, 1, 2, decodes=1), step(2, 3, 2, prefill=50)) == [told, "compute"]


def test_work_is_counted_from_the_models_shape() -> None:
    shape = from_config(
        "m",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
         "vocab_size": 1000, "tie_word_embeddings": True},
        weights=2 * 200_000,
        parameters=200_000,
    )  # fmt: skip
    found = costs(shape, "cpu", block_bytes=16 * 512, block_size=16)
    assert found == Costs(body=136_000, head=64_000, weight_bytes=4.0, attention_flops=4 * 2 * 64, kv_bytes=512)
    assert costs(shape, "native", 16, 16).weight_bytes == 2.0  # as they are in the file
    done = StepExecuted(
        step=1, rows=3, tokens=2, started_ns=0, execute_ns=1, prefill_tokens=10, decodes=1, attention=60, kv_tokens=25
    )
    flops, traffic = work(done, found)
    assert flops == 2 * 136_000 * 11 + 2 * 64_000 * 2 + 512 * 60
    assert traffic == 200_000 * 4 + (25 + 11) * 512
    guessed = msgspec.structs.replace(done, guesses=4)  # each is computed, and goes through the output matrix
    flops, traffic = work(guessed, found)
    assert flops == 2 * 136_000 * 15 + 2 * 64_000 * 7 + 512 * 60
    assert traffic == 200_000 * 4 + (25 + 15) * 512


def test_what_a_run_was_on_is_in_its_trace() -> None:
    ready = ActorReady(actor="executor", pid=1, actor_generation=1, took_ns=1, how="native (avx2)")
    memory = MemoryMeasured(
        moment="after_load", steps=0, resident=1, anonymous=1, file=0, peak=1, device_allocated=None,
        device_reserved=None, block_bytes=77, blocks=2,
    )  # fmt: skip
    assert ran_on(Run([line(0, ready), line(1, memory)])) == ("native", 77)


def test_the_picture_has_a_point_for_each_step_inside_its_frame() -> None:
    steps = [
        StepPoint(i, kind, "compute", flops=10.0**i, bytes=10.0 ** (i // 2), took_ns=10 * MS, waited_ns=0, roof_ns=MS)
        for i, kind in enumerate(KINDS, 3)
    ]
    tree = ElementTree.fromstring(draw.svg(steps, MACHINE, "a <b> & c"))
    circles = [circle for circle in tree.iter("{http://www.w3.org/2000/svg}circle") if len(circle)]
    assert len(circles) == 3
    for circle in circles:
        assert draw.LEFT <= float(circle.attrib["cx"]) <= draw.WIDTH - draw.RIGHT
        assert draw.TOP <= float(circle.attrib["cy"]) <= draw.HEIGHT - draw.BOTTOM
    told = "\n".join(draw.table(steps, MACHINE))
    assert "ridge at 10.0 FLOP/byte" in told
    assert told.count("compute 100%") == 3


def test_a_machine_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "deep" / "machine.json"
    found = machines.machine(kept)
    assert found.flops > found.bytes > 0
    monkeypatch.setattr(machines, "measure", lambda cpus: pytest.fail("it was measured again"))
    assert machines.machine(kept) == found
    kept.write_text("{}")
    with pytest.raises(pytest.fail.Exception):
        machines.machine(kept)


def test_calibrate_measures_the_machine_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(machines, "measure", lambda cpus: MACHINE)
    assert calibrate(tmp_path, machine=True) == 1  # there is no run to fit
    assert "1.0 GFLOP/s and 0.1 GB/s at best (made up); ridge at 10.0 FLOP/byte" in capsys.readouterr().err
    assert (tmp_path / "machine.json").exists()


def test_a_run_that_computed_nothing_has_no_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    with daemon() as running:
        running.wait_ready()
        assert command(run=running.run_dir) == 1
    assert re.search("ran on ghost, which computes nothing", capsys.readouterr().err)
