"""`octavo trace show`: why one request took as long as it did, as text; or its plain events."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.rundir import runs
from octavo.core.trace.catalogue import RequestMatched, RequestPreempted, RequestTaken
from octavo.core.trace.life import QUEUEING, Life, Piece, lives
from octavo.core.trace.read import NoSuchRun, find, lines, records
from octavo.core.trace.run import Run

__all__ = ["describe", "lines", "request_life", "show", "tell"]

_COMMON = ("ts_ns", "spent_ns", "role", "replica", "generation", "event", "request_id")
_API_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_)")
SHOWN_IDS = 4
SLOW_CLIENT_NS = 20_000_000
"""A client that lets a row lie for longer is called slow."""

_MISSES = {
    "": "all its whole blocks",
    "short": "it has no whole block to look up",
    "disabled": "the prefix cache is off (kv.prefix_cache)",
    "computed": "it asked for log-probabilities of its prompt, so that all of it is computed",
    "new": "no common prefix: nothing that is there begins with its first token",
    "ends": "nothing was seen after this prefix",
    "differs": "token {at} is the first that differs from what is there",
    "generated": "from token {at} on it is there as it was generated, which has another KV (executor.prompts)",
    "tenant": "another tenant or adapter has at least its first {at} tokens, and they share nothing",
    "evicted": "the next block was there, and was evicted",
}


def engine_id(api_id: str) -> str:
    """The engine's id of a request, given the `id` of an answer or the engine's own."""
    return _API_PREFIX.sub("", api_id)


# ── one request ──────────────────────────────────────────────────────────────────────────────────


def tell(run: Run, request_id: str) -> list[str]:
    """The causal chain of each choice; of every request of the call, if it had several prompts."""
    wanted = engine_id(request_id)
    names = [wanted] if wanted in run.requests else _parts(run, wanted)
    return [line for name in names for life in lives(run, name) for line in _chain(run, life)]


def _parts(run: Run, wanted: str) -> list[str]:
    """`<id>-<number>`: a call with several prompts is several requests."""
    numbered = [(int(name.removeprefix(f"{wanted}-")), name) for name in run.requests if _is_part(name, wanted)]
    return [name for _, name in sorted(numbered)]


def _is_part(name: str, wanted: str) -> bool:
    return name.startswith(f"{wanted}-") and name.removeprefix(f"{wanted}-").isdigit()


def _chain(run: Run, life: Life) -> list[str]:
    out = [f"request {life.who.request_id}  choice {life.who.choice}{_traced(life)}", f"  {_fate(run, life)}"]
    total = sum(piece.took_ns for piece in life.pieces)
    phases = " + ".join(f"{name} {ms(took)}" for name, took in life.phases().items())
    out.append(f"  E2E {ms(total)} ms = {phases}")
    if life.ttft_ns is not None:
        gap = life.longest_gap
        longest = "" if gap is None else f"; longest time between tokens {_gap(life, gap)}"
        out.append(f"  first token after {ms(life.ttft_ns)} ms{longest}")
    if life.taken is not None:
        out.append(f"  {_client(life.taken)}")
    out += ["", "          at         took"]
    for pieces in _grouped(life.pieces):
        out += _told(run, life, pieces)
    out.append("")
    return out


def _gap(life: Life, gap: tuple[int, int]) -> str:
    return f"{ms(gap[1] - gap[0])} ms, mostly {next(iter(life.causes(*gap)), 'unknown')}"


def _client(taken: RequestTaken) -> str:
    """What the client measured, and whether it was slow itself."""
    measures = {"TTFT": taken.ttft_ns, "ITL": taken.itl_ns, "TPOT": taken.tpot_ns, "E2E": taken.e2e_ns}
    told = ", ".join(f"{name} {ms(value)} ms" for name, value in measures.items() if value is not None)
    slow = f"; it was slow: a row lay ready for {ms(taken.held_ns)} ms" if taken.held_ns > SLOW_CLIENT_NS else ""
    return f"as the client saw it: {told}{slow}"


def _traced(life: Life) -> str:
    trace = f"  trace id {life.trace_id}" if life.trace_id else ""
    return trace + (f"  tenant {life.tenant}" if life.tenant else "")


def _fate(run: Run, life: Life) -> str:
    done = life.finished
    if done is None:
        return life.finish or "not finished"
    again = f", preempted {done.preemptions} times" if done.preemptions else ""
    spare = f", {done.dropped} computed in vain" if done.dropped else ""
    if done.drafted:
        by = f" by {run.drafter}" if run.drafter else ""
        spare += f", {done.accepted} of {done.drafted} guesses{by} right"
    return (
        f"{life.finish or done.finish}: {done.prompt_tokens} prompt tokens ({done.cached} from the cache), "
        f"{done.output_tokens} output tokens{spare}{again}"
    )


def _grouped(pieces: list[Piece]) -> list[list[Piece]]:
    """Runs of pieces of one phase."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and groups[-1][0].phase == piece.phase:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _told(run: Run, life: Life, pieces: list[Piece]) -> list[str]:
    """A phase: one line of its own, one per cause, and what explains it."""
    start, end, phase = pieces[0].start_ns, pieces[-1].end_ns, pieces[0].phase
    out = [f"{ms(start - life.received_ns):>12} ms {ms(end - start):>9} ms  {phase}"]
    by_cause: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_cause.setdefault(piece.cause, []).append(piece)
    for cause, parts in by_cause.items():
        longest = max(parts, key=lambda piece: piece.took_ns)
        took = sum(piece.took_ns for piece in parts)
        often = f" ({len(parts)} times, longest {ms(longest.took_ns)} ms)" if len(parts) > 1 else ""
        note = f": {longest.note}" if longest.note else ""
        out.append(f"{'':17}{ms(took):>10} ms    {cause}{often}{note}")
        if by := _by(parts):
            out.append(f"{'':32}{by}")
    out += [f"{'':32}{line}" for line in _explained(run, life, pieces)]
    return out


def _by(pieces: list[Piece]) -> str:
    """Whose doing it was, if there were several."""
    took: dict[str, int] = {}
    for piece in pieces:
        if piece.by:
            took[piece.by] = took.get(piece.by, 0) + piece.took_ns
    ranked = sorted(took, key=lambda name: -took[name])
    return "of " + _some([f"{name} {ms(took[name])} ms" for name in ranked]) if len(ranked) > 1 else ""


def _explained(run: Run, life: Life, pieces: list[Piece]) -> list[str]:
    start, end, phase = pieces[0].start_ns, pieces[-1].end_ns, pieces[0].phase
    out = []
    if phase == "preempted":
        out += [_preempted(event) for event, ts_ns in life.preempted if ts_ns == start]
    if phase in QUEUEING:
        ahead = [name for name in run.admitted_in(start, end) if name != life.who.request_id]
        if ahead:
            out.append(f"{len(ahead)} requests got a slot before it: {_some(ahead)}")
        longest = max(pieces, key=lambda piece: piece.took_ns)
        step = run.step_at((longest.start_ns + longest.end_ns) // 2)
        if step is not None and step.members:
            holders = list(dict.fromkeys(who.request_id for who in step.members))
            out.append(f"{step.plan.running} sequences were running: {_some(holders)}")
        if phase == "queue" and life.matched is not None:
            out.append(_matched(run, life.matched, start))
    return out


def _matched(run: Run, matched: RequestMatched, now_ns: int) -> str:
    why = _MISSES.get(matched.miss, matched.miss).format(at=matched.at)
    if matched.evicted_ns:
        why += f" {ms(now_ns - matched.evicted_ns)} ms before"
        step = run.step_planned_at(matched.evicted_ns)
        if step is not None:
            takers = list(dict.fromkeys(who.request_id for who in step.chunks or step.members))
            why += f", by step {step.plan.step} for {_some(takers)}"
    where = f", {matched.swapped} of these in host memory" if matched.swapped else ""
    return f"{matched.cached} of {matched.known} tokens were in the prefix tree{where}: {why}"


def _preempted(event: RequestPreempted) -> str:
    what = "copy back" if event.mode == "swap" else "compute again"
    return (
        f"step {event.step} took its blocks for {event.by or 'others'} ({event.mode}): {event.lost} tokens to {what}, "
        f"{max(0, event.need_blocks)} blocks still short, credit {event.credit}"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_IDS} more" if len(names) > SHOWN_IDS else ""
    return ", ".join(names[:SHOWN_IDS]) + more


def ms(took_ns: int) -> str:
    """Milliseconds, two decimals."""
    return f"{took_ns / 1e6:.2f}"


# ── plain events ─────────────────────────────────────────────────────────────────────────────────


def request_life(run_dir: Path, request_id: str) -> list[dict[str, Any]]:
    """The events of one request over all actors, in order of time."""
    found = [event for event in lines(run_dir) if event.get("request_id") == request_id]
    return sorted(found, key=lambda event: int(event["ts_ns"]))


def describe(events: list[dict[str, Any]]) -> list[str]:
    """A line an event, with milliseconds since the first."""
    start = int(events[0]["ts_ns"]) if events else 0
    out = []
    for event in events:
        fields = " ".join(_field(key, value) for key, value in event.items() if key not in _COMMON)
        offset = (int(event["ts_ns"]) - start) / 1e6
        out.append(
            f"{offset:+10.2f} ms  {event['role']:<9}  {event['event'].removeprefix('request.'):<11}  {fields}".rstrip()
        )
    return out


def _field(key: str, value: Any) -> str:
    """Durations in milliseconds; moments are left as they are."""
    if key.endswith("_ns") and isinstance(value, int) and key != "received_ns":
        return f"{key.removesuffix('_ns')}={value / 1e6:.2f}ms"
    return f"{key}={value}"


# ── commands ─────────────────────────────────────────────────────────────────────────────────────


def show(request_id: str, run: Path | None, *, events: bool = False) -> int:
    """Print why a request took as long as it did, or its plain events; 1 if there is no such run or request. Without
    `run` it is looked for in all that there are, in the newest first."""

    def text(path: Path) -> list[str]:
        others = [] if run is not None else [info.path for info in runs() if info.path != path]
        for folder in (path, *others):
            if told := _of(folder, request_id, events):
                return told
        looked = f"{path} and {len(others)} more" if others else str(path)
        raise NoSuchRun(f"request {request_id} is not in the trace of {looked}")

    return printed(run, text)


def _of(path: Path, request_id: str, events: bool) -> list[str]:
    if events:
        return describe(request_life(path, engine_id(request_id)))
    return tell(Run(records(path)), request_id)


def printed(run: Path | None, text: Callable[[Path], list[str]]) -> int:
    """Print what `text` makes of the run's folder; 1 and the reason if there is nothing to tell."""
    try:
        told = text(find(run))
    except NoSuchRun as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    print("\n".join(told))
    return 0
