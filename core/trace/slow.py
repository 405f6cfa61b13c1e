"""`octavo trace slow`: the requests that took too long, grouped by what took most of their time."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from octavo.core.trace.life import Life, lives
from octavo.core.trace.read import records
from octavo.core.trace.run import Run
from octavo.core.trace.show import ms, printed

SHOWN_EXAMPLES = 3


class Threshold(NamedTuple):
    """`ttft=500ms`: a measure and what is too long."""

    measure: str
    limit_ns: int

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """ValueError with what is allowed."""
        found = re.fullmatch(r"(ttft|itl|e2e)=(\d+(?:\.\d+)?)(us|ms|s)", text)
        if found is None:
            raise ValueError(f"{text!r} is not like ttft=500ms, itl=50ms or e2e=2s")
        return cls(found[1], int(float(found[2]) * {"us": 1e3, "ms": 1e6, "s": 1e9}[found[3]]))

    def span(self, life: Life) -> tuple[int, int] | None:
        """The stretch of this life that the measure is about, if it is known."""
        match self.measure:
            case "ttft":
                return None if life.first_token_ns is None else (life.received_ns, life.first_token_ns)
            case "itl":
                return life.longest_gap
            case _:
                return None if life.end_ns is None else (life.received_ns, life.end_ns)


def find_slow(run: Run, threshold: Threshold) -> dict[str, list[tuple[int, Life]]]:
    """Slow choices by the cause that took most of their time; how long each took. Worst cause first."""
    found: dict[str, list[tuple[int, Life]]] = {}
    for request_id in run.requests:
        for life in lives(run, request_id):
            span = threshold.span(life)
            if span is not None and span[1] - span[0] > threshold.limit_ns:
                cause = next(iter(life.causes(*span)), "unknown")
                found.setdefault(cause, []).append((span[1] - span[0], life))
    return dict(sorted(found.items(), key=lambda entry: -sum(took for took, _ in entry[1])))


def _tell_slow(run: Run, threshold: Threshold) -> list[str]:
    found = find_slow(run, threshold)
    count = sum(map(len, found.values()))
    limit = f"{threshold.measure} over {threshold.limit_ns / 1e6:g} ms"
    out = [f"{count} of {len(run.requests)} requests (their choices) have {limit}"]
    for cause, slow_ones in found.items():
        slow_ones.sort(key=lambda entry: -entry[0])
        out.append(f"{len(slow_ones):6}  mostly {cause}")
        for took, life in slow_ones[:SHOWN_EXAMPLES]:
            span = threshold.span(life)
            assert span is not None  # it was found by it
            parts = ", ".join(f"{name} {ms(ns)}" for name, ns in list(life.causes(*span).items())[:3])
            out.append(f"        {life.who.request_id} {ms(took)} ms: {parts}")
    return out


def slow(over: str, run: Path | None) -> int:
    """Print the requests that took longer than that, grouped by cause; 1 if there is no such run, 2 if `over` is no
    threshold."""
    try:
        threshold = Threshold.parse(over)
    except ValueError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 2
    return printed(run, lambda path: _tell_slow(Run(records(path)), threshold))
