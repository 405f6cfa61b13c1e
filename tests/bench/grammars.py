"""The grammar engines beside each other: what a check, a start and a mask take. Writes tests/results/grammars.md.

    PYTHONPATH=. .venv/bin/python tests/bench/grammars.py [--rounds N]

For the default model's vocabulary, on one thread, the engines in turn. A start is the first of its grammar; a mask is
the mean over an answer's tokens (with the token taken), once of a grammar that is new and once of one that has been
walked before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.grammar import GROUP, Engine, Grammars
from octavo.core.messages import Grammar
from octavo.core.models.locate import locate
from octavo.core.plugins import resolve
from octavo.core.tokenizer.vocabulary import load_vocabulary

RESULT = Path(__file__).parents[1] / "results" / "grammars.md"
SIZE = 49152
NAMES = ("llguidance", "xgrammar")
WHAT = ("check", "start", "mask, new", "mask, known")

PERSON = {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}
CASES: dict[str, tuple[Grammar, str]] = {
    "any object": (
        Grammar("schema", '{"type": "object"}'),
        json.dumps({"title": "A day in June", "tags": ["sun", "rain"], "n": [1, 2.5, None], "deep": {"a": {"b": {}}}}),
    ),
    "an object of two": (
        Grammar("schema", json.dumps({"type": "object", "properties": PERSON, "required": [*PERSON]})),
        json.dumps({"name": "Ada Lovelace", "age": 36}),
    ),
    "a list of records": (
        Grammar(
            "schema",
            json.dumps(
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": PERSON,
                        "required": [*PERSON],
                        "additionalProperties": False,
                    },
                }
            ),
        ),
        json.dumps([{"name": name, "age": age} for name, age in (("Ada", 36), ("Grace", 85), ("Edsger", 72))]),
    ),
    "200 properties": (
        Grammar(
            "schema", json.dumps({"type": "object", "properties": {f"key {i}": {"type": "string"} for i in range(200)}})
        ),
        json.dumps({f"key {i}": "a value of some words" for i in range(0, 200, 40)}),
    ),
    "a regular expression": (
        Grammar("regex", r"[a-z]{1,30}(\.[a-z]{1,30}){0,3}@[a-z]+\.(org|com)"),
        "ada.lovelace@mill.org",
    ),
}


class Times(NamedTuple):
    """Seconds, as in `WHAT`."""

    check: float
    start: float
    new: float
    known: float


def took(what: Callable[[], Any]) -> float:
    before = time.perf_counter()
    what()
    return time.perf_counter() - before


def measured(engine: Engine, loaded: Grammars, grammar: Grammar, tokens: list[int]) -> Times:
    def walked() -> float:
        walk = loaded.start(grammar)
        before = time.perf_counter()
        for token in tokens:
            assert walk.mask()[token], f"{grammar} does not let {tokens} come"
            walk.take([token])
        return (time.perf_counter() - before) / len(tokens)

    return Times(
        took(lambda: engine.check(grammar)),
        took(lambda: loaded.start(grammar)),
        walked(),
        min(walked() for _ in range(3)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    vocabulary = load_vocabulary(locate("default"))
    engines: dict[str, Engine] = {name: resolve(GROUP, name)() for name in NAMES}
    found: dict[tuple[str, str], list[Times]] = {}
    for _ in range(rounds):
        loaded = {name: engine.load("default", SIZE) for name, engine in engines.items()}  # anew: nothing is known
        for case, (grammar, text) in CASES.items():
            tokens = vocabulary.encode(text)
            for name, engine in engines.items():
                found.setdefault((case, name), []).append(measured(engine, loaded[name], grammar, tokens))
    lines = [
        "# Grammar engines",
        "",
        f"Written by `tests/bench/grammars.py`: medians of {rounds} rounds in turn, in µs; the ratio is xgrammar's",
        f"time to llguidance's. Vocabulary of {SIZE} tokens, one thread. Masks are a token's mean, it taken.",
        "",
        f"| grammar | {' | '.join(f'{what}: {NAMES[0]}, {NAMES[1]} | ratio' for what in WHAT)} |",
        "|---|" + "---|---|" * len(WHAT),
    ]
    for case in CASES:
        cells = [case]
        for what in range(len(WHAT)):
            one, other = (statistics.median(times[what] for times in found[case, name]) * 1e6 for name in NAMES)
            cells += [f"{one:.0f}, {other:.0f}", f"{other / one:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    RESULT.write_text("\n".join([*lines, ""]))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
