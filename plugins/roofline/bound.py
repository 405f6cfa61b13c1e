"""A step's arithmetic and traffic, and what bounds it. Pure: a run, a model's shape and a machine in, rows out.

    scheduling   the executor waited for the step for longer than it computed it, though somebody was running
    compute      its arithmetic takes longer than its traffic, at the machine's best
    bandwidth    its traffic takes longer
    capacity     so it does, and a larger batch would have shared it: but whoever waited had no slot or no blocks

Operations: 2 a weight and token, 4 a head, dimension and pair of attending tokens; the output matrix only for rows that
sample. Bytes: every weight once a step, in the executor's own width, and the KV that is read and written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from octavo.core.trace.catalogue import ActorReady, MemoryMeasured, StepExecuted
from octavo.core.trace.run import Run
from octavo.plugins.memory.shape import Shape
from octavo.plugins.roofline.machine import Machine

Bound = Literal["compute", "bandwidth", "capacity", "scheduling"]
BOUNDS: tuple[Bound, ...] = ("compute", "bandwidth", "capacity", "scheduling")
Kind = Literal["prefill", "decode", "mixed"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "mixed")

WIDTHS = {"cpu": 4.0, "cuda": 2.0}
"""Bytes of a weight where an executor has its own; others keep them as they are in the file."""
NO_ROOM = ("slots", "blocks")


class Costs(NamedTuple):
    """What a model's step costs per unit of its work. `body` and `head` are numbers of weights."""

    body: int
    head: int
    weight_bytes: float
    attention_flops: int
    """A pair of attending tokens, of all layers."""
    kv_bytes: float
    """A token, of all layers."""


class StepPoint(NamedTuple):
    """A step in the picture. Rates are of the time it was computed; `roof_ns` is the least it could take."""

    step: int
    kind: Kind
    bound: Bound
    flops: float
    bytes: float
    took_ns: int
    waited_ns: int
    roof_ns: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    @property
    def attained(self) -> float:
        """Operations per second."""
        return self.flops * 1e9 / self.took_ns


def costs(shape: Shape, executor: str, block_bytes: int, block_size: int) -> Costs:
    """`executor` is the kind that ran; KV as its pool has it."""
    head = shape.vocab * shape.hidden
    body = max(0, shape.parameters - head * (1 if shape.tied else 2))
    layers = sum(layer.attention != "state" for layer in shape.layers)
    width = WIDTHS.get(executor, shape.weights / max(1, shape.parameters))
    return Costs(body, head, width, 4 * layers * shape.heads * shape.head_dim, block_bytes / block_size)


def ran_on(run: Run) -> tuple[str, int]:
    """The executor's kind, and the bytes of its blocks."""
    kind, block_bytes = "", 0
    for line in run.lines:
        if isinstance(line.event, ActorReady) and line.event.actor == "executor":
            kind = line.event.how.partition(" ")[0]
        elif isinstance(line.event, MemoryMeasured) and line.event.block_bytes:
            block_bytes = line.event.block_bytes
    return kind, block_bytes


def points(run: Run, costs: Costs, machine: Machine) -> Iterator[StepPoint]:
    """Every step that computed something, in the order in which they ran."""
    ran = [record for record in run.steps if record.executed is not None]
    ran.sort(key=lambda record: record.executed.started_ns if record.executed else 0)
    free_ns = 0
    for record in ran:
        done = record.executed
        assert done is not None  # chosen for it
        end_ns = done.started_ns + done.execute_ns
        went_on = record.plan.sequences > record.plan.opens + record.plan.forks
        waited_ns = max(0, done.started_ns - free_ns) if free_ns and went_on else 0
        free_ns = end_ns
        if done.prefill_tokens + done.decodes == 0 or done.execute_ns <= 0:
            continue
        flops, traffic = work(done, costs)
        compute_ns, memory_ns = flops / machine.flops * 1e9, traffic / machine.bytes * 1e9
        bound: Bound = "compute" if compute_ns >= memory_ns else "bandwidth"
        if waited_ns > done.execute_ns:
            bound = "scheduling"
        elif bound == "bandwidth" and any(w.resource in NO_ROOM for w in run.waits_in(done.started_ns, end_ns)):
            bound = "capacity"
        kind: Kind = "decode" if not done.prefill_tokens else "mixed" if done.decodes else "prefill"
        yield StepPoint(done.step, kind, bound, flops, traffic, done.execute_ns, waited_ns, max(compute_ns, memory_ns))


def work(done: StepExecuted, costs: Costs) -> tuple[float, float]:
    """Operations and bytes of a step."""
    tokens = done.prefill_tokens + done.decodes * done.rounds + done.guesses
    sampled = done.rows + done.guesses if done.guesses else done.tokens
    flops = 2 * costs.body * tokens + 2 * costs.head * sampled + costs.attention_flops * done.attention
    weights = costs.body + (costs.head if done.tokens else 0)
    read = weights * costs.weight_bytes * done.rounds
    return float(flops), read + (done.kv_tokens + tokens) * costs.kv_bytes
