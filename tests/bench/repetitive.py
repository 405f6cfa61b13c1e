"""Prompts whose answers repeat much of them (an edit of code, JSON, a quote), and some whose answers do not (chat): as
many different ones as are asked for, each begun so that a small model goes on as it should."""

from __future__ import annotations

from collections.abc import Callable

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

_LISTS = (
    ("people", "age", "city", '"Ada", "age": 36, "city": "London"', '"Bob", "age": 41, "city": "Paris"'),
    ("towers", "height", "city", '"Ben", "height": 96, "city": "London"', '"Eiffel", "height": 330, "city": "Paris"'),
    ("rivers", "length", "mouth", '"Thames", "length": 346, "mouth": "Kent"', '"Po", "length": 652, "mouth": "Adria"'),
    ("players", "points", "team", '"Ann", "points": 12, "team": "Reds"', '"Ben", "points": 9, "team": "Blues"'),
    ("books", "pages", "writer", '"Emma", "pages": 474, "writer": "Austen"', '"Job", "pages": 129, "writer": "Roth"'),
)  # fmt: skip
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


def code_edit(i: int) -> str:
    thing, field, name = _THINGS[i % 12], _FIELDS[i % 11], _NAMES[i % 13]
    verbs = [_VERBS[(i + j * (1 + i // 12 % 5)) % 12] + "_it" * (i >= 60) for j in range(4)]

    def text(field: str) -> str:
        methods = "".join(
            f"\n    def {verb}(self, amount):\n        self.{field} = self.{field} {sign} amount\n"
            f"        return self.{field}\n"
            for verb, sign in zip(verbs, _SIGNS, strict=True)
        )
        return f"class {thing}{i}:\n    def __init__(self, start):\n        self.{field} = start\n{methods}"

    new = text(name)
    begun = new[: new.index("return") + len(f"return self.{name}")]
    return f"# The class before the change:\n\n{text(field)}\n\n# The same class, `{field}` is now `{name}`:\n\n{begun}"


def as_json(i: int) -> str:
    what, one, other, first, second = _LISTS[i % 5]
    rows = "".join(f'  {{"name": {row}, "country": "{k}"}},\n' for row, k in ((first, "UK"), (second, "France")))
    return (
        _turn(f"Write list {i} of {20 + i} {what} as JSON, each with name, {one}, {other} and country.") + f"[\n{rows}"
    )


def quote(i: int) -> str:
    place, when = _PLACES[i % 11], 1700 + 7 * i % 199
    text = (
        f"The {place} was built in {when} by {_BUILDERS[i % 5]}. It stood at the end of a long road, and people came "
        f"from far away to see it. In {when + 40 + i % 9} it was given {_LATER[i % 6]}, which cost {3 + i} thousand "
        f"crowns. After the war it stood empty for {5 + i % 30} years. Today it is {_NOW[i // 2 % 5]}, and on Sundays "
        f"visitors may climb its {110 + 3 * i} steps and look over the whole valley down to the river and the hills."
    )
    return f"The text:\n\n{text}\n\nThe same text, word by word:\n\n{text[: text.index('. It stood') + 4]}"


def chat(i: int) -> str:
    return _turn(f"{_ASKED[i % 11]}{f' (question {i})' * (i >= 11)}")


def _turn(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


WORKLOADS: dict[str, Callable[[int], str]] = {"code edit": code_edit, "JSON": as_json, "quotes": quote, "chat": chat}
"""By name; the text of the i-th request, from -1 on."""
