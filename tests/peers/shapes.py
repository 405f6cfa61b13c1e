"""What two servers' answers to one request have in common, field by field. Pure.

A *shape* is a map from paths (`choices[].message.content`) to the kinds of value found there. Values are compared only
where the case says so: texts, log-probabilities, counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

Shape = Mapping[str, frozenset[str]]
"""Path → kinds: null, boolean, number, string, list, object."""

FREE = frozenset({"logit_bias", "metadata"})
"""Objects whose keys are data."""

KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "list"}


class Answer(NamedTuple):
    """One server's answer. `chunks` are the events of a stream, else empty."""

    status: int
    kind: str
    """Its media type."""
    body: Any
    chunks: list[Any]
    done: bool
    """A stream ended with [DONE]."""


class Difference(NamedTuple):
    case: str
    path: str
    ours: str
    theirs: str


class Allowed(NamedTuple):
    """Differences that are meant: patterns (`*` is anything) of the case and the path, and why."""

    case: str
    path: str
    why: str

    def covers(self, difference: Difference) -> bool:
        return fnmatchcase(difference.case, self.case) and fnmatchcase(_plain(difference.path), _plain(self.path))


def _plain(path: str) -> str:
    """Brackets mean themselves, not sets of characters."""
    return path.replace("[", "<").replace("]", ">")


def shape(value: Any, at: str = "") -> Shape:
    found: dict[str, set[str]] = {}
    for path, kind in _kinds(value, at):
        found.setdefault(path, set()).add(kind)
    return {path: frozenset(kinds) for path, kinds in found.items()}


def _kinds(value: Any, at: str) -> Iterator[tuple[str, str]]:
    yield at, KINDS.get(type(value), "object")
    if isinstance(value, dict):
        keyed = at.rpartition(".")[2] in FREE or at.endswith("top_logprobs[]")
        for key, item in value.items():
            yield from _kinds(item, f"{at}.{'*' if keyed else key}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _kinds(item, f"{at}[]")


def apart(case: str, ours: Shape, theirs: Shape) -> Iterator[Difference]:
    """Paths that one has and the other has not (below a missing object nothing more is said), or other kinds."""
    for path in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(path), theirs.get(path)
        if mine == other or _parent_missing(path, ours, theirs):
            continue
        yield Difference(case, path, _words(mine), _words(other))


def _parent_missing(path: str, *shapes: Shape) -> bool:
    parents = [path[: found.start()] for found in re.finditer(r"\.|\[\]", path)]
    return any(parent and any(parent not in one for one in shapes) for parent in parents)


def _words(kinds: Iterable[str] | None) -> str:
    return "absent" if kinds is None else " or ".join(sorted(kinds))


def answers_apart(case: str, ours: Answer, theirs: Answer) -> list[Difference]:
    """Everything but values."""
    found = []
    for name in ("status", "kind", "done"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            found.append(Difference(case, f"({name})", str(mine), str(other)))
    if ours.chunks or theirs.chunks:
        found += apart(case, shape(ours.chunks), shape(theirs.chunks))
        for name, value in (
            ("first chunk", chunk_kinds(ours.chunks)[:1]),
            ("last chunk", chunk_kinds(ours.chunks)[-1:]),
        ):
            other = chunk_kinds(theirs.chunks)[: 1 if name == "first chunk" else None][-1:]
            if value != other:
                found.append(Difference(case, f"({name})", json.dumps(value), json.dumps(other)))
    else:
        found += apart(case, shape(ours.body), shape(theirs.body))
    return found


def chunk_kinds(chunks: list[Any]) -> list[str]:
    """What each event of a stream is for: its choice's non-empty parts."""
    kinds = []
    for chunk in chunks:
        choices = chunk.get("choices")
        if not choices:
            kinds.append("usage" if chunk.get("usage") else str(chunk.get("type", "nothing")))
            continue
        delta = choices[0].get("delta", choices[0])
        parts = [name for name in ("role", "content", "text", "tool_calls") if delta.get(name)]
        kinds.append(" and ".join(parts + ["finish"] * (choices[0].get("finish_reason") is not None)) or "nothing")
    return kinds


def texts(answer: Answer) -> list[str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for body in answer.chunks or [answer.body]:
        for choice in body.get("choices", ()):
            part = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + part
    return [found[index] for index in sorted(found)]


def finishes(answer: Answer) -> list[str]:
    bodies = answer.chunks or [answer.body]
    every = [choice for body in bodies for choice in body.get("choices", ())]
    return [
        str(choice["finish_reason"]) for choice in sorted(every, key=lambda c: c["index"]) if choice["finish_reason"]
    ]


def usage(answer: Answer) -> dict[str, Any]:
    """Counts of the last usage there is."""
    found = [body["usage"] for body in answer.chunks or [answer.body] if body.get("usage")]
    last = found[-1] if found else {}
    return {key: value for key, value in last.items() if isinstance(value, int)}


def logprobs(answer: Answer) -> list[tuple[str, float | None]]:
    """Token and log-probability of everything that has one, in order."""
    found: list[tuple[str, float | None]] = []
    for body in answer.chunks or [answer.body]:
        for choice in body.get("choices", ()):
            known = choice.get("logprobs") or {}
            if "tokens" in known:
                found += list(zip(known["tokens"], known["token_logprobs"], strict=True))
            else:
                found += [(entry["token"], entry["logprob"]) for entry in known.get("content") or ()]
    return found


def values_apart(case: str, ours: Answer, theirs: Answer, near: float) -> list[Difference]:
    """What greedy answers of the same weights must agree in."""
    found = []
    for name, of in (("texts", texts), ("finishes", finishes), ("usage", usage)):
        mine, other = of(ours), of(theirs)
        if mine != other:
            found.append(Difference(case, f"({name})", json.dumps(mine), json.dumps(other)))
    mine_l, other_l = logprobs(ours), logprobs(theirs)
    if [token for token, _ in mine_l] != [token for token, _ in other_l]:
        found.append(Difference(case, "(logprob tokens)", json.dumps(mine_l[:4]), json.dumps(other_l[:4])))
    else:
        pairs = [(a, b) for (_, a), (_, b) in zip(mine_l, other_l, strict=True)]
        far = [(a, b) for a, b in pairs if (a is None) != (b is None) or (a is not None and abs(a - (b or 0)) > near)]
        if far:
            found.append(Difference(case, "(logprobs)", str(far[0][0]), str(far[0][1])))
    return found
