"""Fits a cost model to a run: least squares over what `step.executed` says of each step, and means of the hops.

Errors are relative (a step of 10 ms and one of 1 s weigh the same), coefficients are never negative: one that would be
is left out, and the others are fitted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.plugins.sim.cost import CostFile, CostModel

Floats: TypeAlias = npt.NDArray[np.float64]

TERMS = ("step", "prefill_token", "decode", "attention", "kv_token", "copied_block", "guess")
"""Coefficients of the model, by column of the work."""
RARE = ("copied_block", "guess")
"""Of work that a run may have none of: then it says nothing of the price."""
_WAY = ("request.received", "request.queued", "request.first_token", "request.taken")
LEAST_STEPS = 20
REWEIGHTINGS = 8


class FitError(ValueError):
    """A run that a model cannot be fitted to."""


class Hops(NamedTuple):
    """In seconds. Means, since means are to be foretold; the longest hundredth counts as the shortest of it."""

    to_kv: float
    to_executor: float
    between: float
    to_scheduler: float
    to_client: float


def fit(events: Iterable[Mapping[str, Any]], source: str) -> CostFile:
    """From all events of a run, in any order. Raises `FitError`."""
    steps: dict[int, dict[str, Mapping[str, Any]]] = {}
    requests: dict[str, dict[str, Mapping[str, Any]]] = {}
    for event in events:
        name = event["event"]
        if name.startswith("step."):
            steps.setdefault(event["step"], {})[name] = event
        elif name in _WAY and not event.get("choice"):
            requests.setdefault(event["request_id"], {})[name] = event
    executed = [step["step.executed"] for step in steps.values() if "step.executed" in step]
    executed = [event for event in executed if event["rows"] and event["execute_ns"] > 0]
    if len(executed) < LEAST_STEPS:
        raise FitError(
            f"{source}: {len(executed)} steps with work in its trace, at least {LEAST_STEPS} are needed; "
            "run it under load, with trace.steps on"
        )
    work = np.array(
        [
            [
                e.get("rounds", 1),  # as old runs
                e["prefill_tokens"],
                e["decodes"] * e.get("rounds", 1),
                e["attention"],
                e["kv_tokens"],
                e.get("copied", 0),
                e.get("guesses", 0),
            ]
            for e in executed
        ],
        dtype=np.float64,
    )
    seconds = np.array([e["execute_ns"] for e in executed], dtype=np.float64) / 1e9
    coefficients = solve(work, seconds)
    predicted = work @ coefficients
    errors = np.abs(predicted - seconds) / seconds
    terms = dict(zip(TERMS, coefficients.tolist(), strict=True))
    for term in RARE:
        if not work[:, TERMS.index(term)].any():
            del terms[term]
    cost = CostModel(**terms, **_hops(list(steps.values()), requests)._asdict())
    return CostFile(
        cost=cost,
        steps=len(executed),
        mean_error=float(errors.mean()),
        p90_error=float(np.percentile(errors, 90)),
        bias=float(predicted.sum() / seconds.sum() - 1),
        source=source,
    )


def solve(work: Floats, seconds: Floats) -> Floats:
    """Coefficients ≥ 0, shape [terms], that minimise the squared error of `work` [steps, terms] @ them, relative to
    what is predicted: relative to what was measured, steps that something held up would hardly count."""
    found = _least_squares(work, seconds, seconds)
    for _ in range(REWEIGHTINGS):
        predicted = work @ found
        found = _least_squares(work, seconds, np.maximum(predicted, predicted.max() * 1e-3))
    return found


def _least_squares(work: Floats, seconds: Floats, unit: Floats) -> Floats:
    """The error of each step is measured in its `unit`, shape [steps]."""
    weighted = work / unit[:, None]
    scale = np.abs(weighted).max(axis=0)
    kept = np.flatnonzero(scale)  # a term that never occurs has no coefficient
    found = np.zeros(work.shape[1])
    while len(kept):
        solution, *_ = np.linalg.lstsq(weighted[:, kept] / scale[kept], seconds / unit, rcond=1e-9)
        if (solution >= 0).all():
            found[kept] = solution / scale[kept]
            break
        kept = np.delete(kept, int(solution.argmin()))
    return found


def _hops(steps: list[dict[str, Mapping[str, Any]]], requests: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Hops:
    """A plan's way is its `ts_ns` to the KV-manager's; a bind's is seen where the executor was free, what lies between
    two steps where the second was there in time."""
    to_kv, to_executor, to_scheduler = [], [], []
    waited: list[tuple[int, int]] = []
    """Of steps bound before the executor was free: how long before, and how long after it they began."""
    free_ns = 0
    for step in sorted((s for s in steps if "step.executed" in s), key=lambda s: int(s["step.executed"]["started_ns"])):
        executed = step["step.executed"]
        end = executed["started_ns"] + executed["execute_ns"]
        if (bound := step.get("step.bound")) is not None:
            if (planned := step.get("step.planned")) is not None:
                to_kv.append(bound["ts_ns"] - planned["ts_ns"])
            if bound["ts_ns"] >= free_ns:
                to_executor.append(executed["started_ns"] - bound["ts_ns"])
            else:
                waited.append((free_ns - bound["ts_ns"], executed["started_ns"] - free_ns))
        if (completed := step.get("step.completed")) is not None:
            to_scheduler.append(completed["ts_ns"] - end)
        free_ns = end
    defaults = CostModel()
    way = _mean(to_executor, defaults.to_executor)
    return Hops(
        _mean(to_kv, defaults.to_kv),
        way,
        _mean([after for before, after in waited if before / 1e9 >= way], defaults.between),
        _mean(to_scheduler, defaults.to_scheduler),
        _mean(list(filter(None, map(_to_client, requests.values()))), defaults.to_client),
    )


def _to_client(events: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Half of what a client's own time to the first token has beyond the scheduler's; if no client told its time, the
    way from the tokenizer to the scheduler."""
    taken, first = events.get("request.taken"), events.get("request.first_token")
    if taken is not None and first is not None and taken["ttft_ns"] is not None:
        return float(taken["ttft_ns"] - first["since_queued_ns"]) / 2
    queued, received = events.get("request.queued"), events.get("request.received")
    return None if queued is None or received is None else float(queued["ts_ns"] - received["received_ns"])


def _mean(values_ns: Sequence[float], otherwise: float) -> float:
    if not values_ns:
        return otherwise
    values = np.asarray(values_ns, dtype=np.float64)
    return max(0.0, float(np.minimum(values, np.percentile(values, 99)).mean())) / 1e9
