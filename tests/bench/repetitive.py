"""Prompts whose answers repeat much of them (an edit of code, JSON, a quote), and some whose answers do not (chat): as
many different ones as are asked for, each begun so that a small model goes on as it should."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

_VERBS = ("increase", "deposit", "fill", "win", "extend", "raise", "load", "push", "mark", "open", "shift", "hold")
_SIGNS = "+-*/"
_THINGS = ("Counter", "Account", "Tank", "Score", "Budget", "Timer", "Stock", "Queue", "Meter", "Valve", "Lamp", "Gate")
_FIELDS = ("value", "level", "amount", "points", "size", "state", "length", "weight", "rate", "depth", "count")
_NAMES = (
    "total",
    "height",
    "sum",
    "score",
    "mass",
    "mode",
    "width",
    "load",
    "speed",
    "limit",
    "number",
    "share",
    "mark",
)

_PLACES = (
    "lighthouse",
    "mill",
    "station",
    "bridge",
    "tower",
    "harbour",
    "castle",
    "library",
    "garden",
    "theatre",
    "school",
)
_BUILDERS = ("a company of merchants", "the old council", "two brothers", "the railway", "monks from the north")
_LATER = ("electric lamps", "a roof of slate", "a second gate", "wide new stairs", "a clock with four faces", "a lift")
_NOW = (
    "a small museum",
    "a cafe that opens in April",
    "an archive of maps",
    "a shop for books",
    "a place for concerts",
)

_TABLES = (
    ("people", ("name", "age", "city", "team"), (
        ("Ada", "Bob", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"), (36, 41, 29, 52, 33, 47, 25, 38),
        ("London", "Paris", "Rome", "Berlin", "Madrid"), ("red", "blue", "green"))),
    ("orders", ("order", "amount", "status", "country"), (
        ("A-17", "B-20", "C-31", "D-44", "E-58", "F-63", "G-75", "H-92"), (120, 75, 310, 42, 99, 260, 18, 150),
        ("paid", "open", "sent", "paid", "late"), ("France", "Spain", "Italy"))),
    ("books", ("title", "pages", "writer", "shelf"), (
        ("Emma", "Dune", "Ulysses", "Hamlet", "Dracula", "Walden", "Heidi", "Kim"),
        (474, 612, 730, 289, 418, 352, 240, 368), ("Austen", "Herbert", "Joyce", "Stoker", "Thoreau"),
        ("fiction", "drama", "essays"))),
    ("sensors", ("sensor", "value", "unit", "room"), (
        ("temp-1", "temp-2", "hum-1", "hum-2", "co2-1", "lux-1", "lux-2", "temp-3"),
        (21, 19, 45, 52, 610, 320, 280, 23), ("celsius", "percent", "ppm", "lux", "celsius"),
        ("hall", "kitchen", "attic"))),
)  # fmt: skip
_ROWS = 8
_ASKED = (
    "Tell me about a day at the sea.",
    "Why is the sky blue?",
    "How do I learn to play the piano?",
    "Write a short story about a dragon who is afraid of fire.",
    "What should I cook for dinner tonight?",
    "Explain what a database index is.",
    "Give me advice for a job interview.",
    "What was the industrial revolution?",
    "How does a bicycle stay upright?",
    "Describe a walk through an old town at night.",
    "What makes a good friend?",
)


class Task(NamedTuple):
    """What is asked, and the answer that would be right: whoever asks so lets an answer have about as many tokens."""

    prompt: str
    answer: str


def code_edit(i: int) -> Task:
    """A class in which an attribute gets another name."""
    thing, field, name = _THINGS[i % 12], _FIELDS[i % 11], _NAMES[i % 13]
    verbs = [_VERBS[(i + j * (1 + i // 12 % 5)) % 12] + "_it" * (i >= 60) for j in range(6)]

    def text(field: str) -> str:
        methods = "".join(
            f"\n    def {verb}(self, amount):\n        self.{field} = self.{field} {_SIGNS[j % 4]} amount\n"
            f"        return self.{field}\n"
            for j, verb in enumerate(verbs)
        )
        return f"class {thing}{i}:\n    def __init__(self, start):\n        self.{field} = start\n{methods}"

    new = text(name)
    at = new.index("return") + len(f"return self.{name}")
    asked = f"# The class before the change:\n\n{text(field)}\n\n# The same class, `{field}` is now `{name}`:\n\n"
    return Task(asked + new[:at], new[at:])


def as_json(i: int) -> Task:
    """A table's rows as records with the same keys."""
    what, keys, columns = _TABLES[i % 4]
    rows = [[column[(i // 4 + j * (1 + i // 32 % 3)) % len(column)] for column in columns] for j in range(_ROWS)]
    table = "\n".join(",".join(map(str, row)) for row in (keys, *rows))
    records = [f"  {json.dumps(dict(zip(keys, row, strict=True)))}" for row in rows]
    all_, begun = "[\n" + ",\n".join(records) + "\n]\n", "[\n" + records[0] + ",\n"
    return Task(f"List {i} of {what} as CSV:\n\n{table}\n\nThe same list as JSON:\n\n{begun}", all_[len(begun) :])


def quote(i: int) -> Task:
    """One of the passages that were found for a question, word by word."""
    passages = [_passage(i), _passage(i + 17), _passage(i + 31)]
    found = "\n\n".join(f"[{n}] {passage}" for n, passage in enumerate(passages, 1))
    cited = i % 3
    at = passages[cited].index(". It stood") + 4
    return Task(
        f"Passages:\n\n{found}\n\nPassage [{cited + 1}] word by word:\n\n{passages[cited][:at]}", passages[cited][at:]
    )


def _passage(i: int) -> str:
    place, when = _PLACES[i % 11], 1700 + 7 * i % 199
    return (
        f"The {place} was built in {when} by {_BUILDERS[i % 5]}. It stood at the end of a long road, and people came "
        f"from far away to see it. In {when + 40 + i % 9} it was given {_LATER[i % 6]}, which cost {3 + i} thousand "
        f"crowns. After the war it stood empty for {5 + i % 30} years. Today it is {_NOW[i // 2 % 5]}, and on Sundays "
        f"visitors may climb its {110 + 3 * i} steps and look over the whole valley down to the river and the hills."
    )


def chat(i: int) -> Task:
    """An answer that repeats nothing; it ends when it likes."""
    return Task(_turn(f"{_ASKED[i % 11]}{f' (question {i})' * (i >= 11)}"), "")


def _turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


WORKLOADS: dict[str, Callable[[int], Task]] = {"code edit": code_edit, "JSON": as_json, "quotes": quote, "chat": chat}
"""By name; the i-th request, from -1 on."""
