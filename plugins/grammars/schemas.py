"""JSON schemas and regular expressions as text: what is refused whatever the engine, and the JSON pointer of what an
engine does not serve. It must not know which engine asks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from octavo.core.grammar import GrammarError
from octavo.core.messages import Grammar

MOST_SPACE = 20
"""Characters of white space between two tokens of JSON: a model may otherwise write it for ever."""

MOST_PARTS = 64
MOST_CHARACTERS = 50_000

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Their values are schemas by name."""

_VALUES = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired", "x-guidance"})
"""Their values are none."""

_SAYS_SOMETHING = {
    "$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "properties", "patternProperties",
    "additionalProperties", "required", "items", "prefixItems", "minItems", "maxItems", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "title", "$defs", "definitions", "$schema", "$id", "description", "default", "examples",
    "minProperties", "maxProperties", "propertyNames", "contains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "x-guidance",
}  # fmt: skip
"""Keywords of JSON Schema. Others mean nothing, but a schema of nothing else is none."""


def check_length(grammar: Grammar, most: int) -> None:
    """An engine's time for a grammar grows with its text, and everyone waits for it. Raises `GrammarError`."""
    if len(grammar.text) > most:
        raise GrammarError(f"the {grammar.kind} is not served: it has more than {most} characters")


def read_schema(text: str, most_repeats: int) -> dict[str, Any] | bool:
    """The schema; its patterns repeat at most so often. Raises `GrammarError`."""
    try:
        schema = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema must be an object or a boolean")
    if isinstance(schema, dict) and schema and not _SAYS_SOMETHING & schema.keys():
        raise GrammarError(f"the schema has no keyword of JSON Schema, only {', '.join(sorted(schema))[:200]}")
    for pointer, key, value in _walk(schema, ""):
        if key == "pattern" and isinstance(value, str):
            check_regex(value, f" at {pointer}", most_repeats)
    return schema


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON's")
    return value


def check_regex(text: str, where: str, most_repeats: int) -> None:
    """What an engine would take, but means nothing or would compute for ever. Raises `GrammarError`."""
    try:
        re.compile(text)
    except re.error as error:
        if "multiple repeat" in str(error):
            raise GrammarError(f"the regular expression{where} is not valid: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise GrammarError(f"the regular expression{where} is too large") from error
    within, around = 1, 1  # repeats of a single thing, and of groups, which may hold the others
    for found in re.finditer(r"(\)?)\{(\d*)(?:,(\d*))?\}", text):
        most = max((int(n) for n in found.groups()[1:] if n), default=1)
        within, around = (within, around * max(most, 1)) if found[1] else (max(within, most), around)
        if within * around > most_repeats:
            raise GrammarError(f"the regular expression{where} repeats more than {most_repeats} times: {found[0][:40]}")


def place(schema: Any, is_served: Callable[[dict[str, Any]], bool]) -> str:
    """The pointer of what is not served: of the innermost part that is not, and in it of the keyword without which it
    would be, or which is not served even alone. Only the outer `MOST_PARTS` are looked at, and `MOST_CHARACTERS` of
    them all together: others wait for this."""
    if not isinstance(schema, dict):
        return "/"
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    room = MOST_CHARACTERS
    for pointer, part in reversed(list(islice(_parts(schema, ""), MOST_PARTS))):
        whole = {**shared, **part}
        room -= len(json.dumps(whole))
        if room < 0:
            break
        if not is_served(whole):
            without = (key for key in part if is_served({name: whole[name] for name in whole if name != key}))
            alone = (key for key in part if not is_served({**shared, key: part[key]}))
            key = next(chain(without, alone), None)
            return pointer or "/" if key is None else f"{pointer}/{escaped(key)}"
    return "/"


def escaped(key: str) -> str:
    """As one step of a JSON pointer (RFC 6901, section 3)."""
    return key.replace("~", "~0").replace("/", "~1")


def _parts(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in it, an outer one before its inner ones."""
    yield pointer, schema
    for key, value in schema.items():
        at = f"{pointer}/{escaped(key)}"
        if key in MAPS and isinstance(value, dict):
            inner = [(f"{at}/{escaped(name)}", item) for name, item in value.items()]
        elif key in _VALUES:
            inner = []
        elif isinstance(value, list):
            inner = [(f"{at}/{i}", item) for i, item in enumerate(value)]
        else:
            inner = [(at, value)]
        for path, item in inner:
            if isinstance(item, dict):
                yield from _parts(item, path)


def _walk(value: Any, pointer: str) -> Iterator[tuple[str, str, Any]]:
    """Every key of every object in it, with its JSON pointer."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        path = f"{pointer}/{escaped(str(key))}"
        yield path, str(key), item
        yield from _walk(item, path)
