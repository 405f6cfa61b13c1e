"""Which JSON schemas xgrammar keeps to, in the words in which it does. Pure.

The library takes any schema and passes over what it does not know, so that an answer might not validate. Here such a
keyword is refused with its pointer, and what it has no word for is said in those that it has: a type that follows from
the other keywords, values that fit the type, `oneOf` as `anyOf` where no two can hold at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any, Final, NoReturn

from octavo.core.grammar import GrammarError
from octavo.plugins.grammars.schemas import MAPS, escaped

Schema = dict[str, Any]

_TYPE_OF: Final = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties",
        "maxProperties",
    ),
}  # fmt: skip
"""Which keywords are about values of which type."""

_RULES = {keyword: kind for kind, keywords in _TYPE_OF.items() for keyword in keywords}

_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Where the library finds one of them, it looks no further."""

_NEVER: dict[str, Any] = {
    "not": None, "if": None, "contains": None, "minContains": None, "maxContains": None, "uniqueItems": False,
    "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}, "unevaluatedProperties": True,
    "unevaluatedItems": True, "additionalItems": True, "$dynamicRef": None, "$recursiveRef": None,
}  # fmt: skip
"""Passed over by the library; the value with which a keyword says nothing."""

_FORMATS = frozenset({
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
})  # fmt: skip

_SHAPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), (dict, "an object")),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf", "prefixItems", "required"), (list, "a list")),
    **dict.fromkeys(("$ref", "pattern", "format"), (str, "a string")),
}

_MOST_MULTIPLE = 1024
_NEAREST = 1e-5
"""Bounds of a number closer to each other than this leave the library, which writes six decimals, nothing between."""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0,
}


def kept(schema: Schema | bool, at: str = "") -> Schema | bool:
    """The same schema in words that the library keeps to; `at` is its pointer. Raises `GrammarError`."""
    if not isinstance(schema, dict):
        return schema
    for key, nothing in _NEVER.items():
        if key in schema and schema[key] != nothing:
            _refuse(f"{at}/{key}", "it is not kept to")
    for key, (shape, what) in _SHAPES.items():
        if key in schema and not isinstance(schema[key], shape):
            _refuse(f"{at}/{key}", f"it must be {what}")
    for key in ("type", "required"):
        names = schema.get(key, [])
        if not all(isinstance(name, str) for name in (names if isinstance(names, list) else [names])):
            _refuse(f"{at}/{key}", "it must be made of strings")
    found = {key: _inner(key, value, f"{at}/{escaped(key)}") for key, value in schema.items()}
    whole = [key for key in _WHOLE if key in found]
    if not whole:
        return _typed(found, at)
    beside = [*whole[1:], *(key for key in found if key in _RULES)]
    if "type" in found and whole[0] not in ("const", "enum"):
        beside.append("type")
    if beside:
        _refuse(f"{at}/{beside[0]}", f"beside {whole[0]} it is not kept to")
    return _one(found, whole[0], at)


def _inner(key: str, value: Any, at: str) -> Any:
    """A keyword's value with the schemas in it kept to."""
    if key in MAPS:
        return {name: _schema(item, f"{at}/{escaped(name)}") for name, item in value.items()}
    if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return [_schema(item, f"{at}/{i}") for i, item in enumerate(value)]
    if key in ("items", "additionalProperties", "propertyNames") and isinstance(value, dict):
        return kept(value, at)
    return value


def _schema(value: Any, at: str) -> Any:
    if not isinstance(value, dict | bool):
        _refuse(at, "a schema must be an object or a boolean")
    return kept(value, at)


def _one(found: Schema, key: str, at: str) -> Schema:
    """A schema that says what it says by this one keyword."""
    pointer = f"{at}/{key}"
    value = found[key]
    match key:
        case "$ref":
            if not value.startswith("#"):
                _refuse(pointer, "only references within the schema are followed")
        case "const" | "enum" if "type" in found:
            types = found["type"] if isinstance(found["type"], list) else [found["type"]]
            values = [value] if key == "const" else value
            fitting = [one for one in values if any(_TYPES.get(kind, _none)(one) for kind in types)]
            if not fitting:
                _refuse(pointer, f"no value is of the type {found['type']}")
            return {**{name: found[name] for name in found if name not in (key, "type")}, "enum": fitting}
        case "anyOf" | "oneOf" | "allOf" if not value:
            _refuse(pointer, "there is no schema in it")
        case "allOf" if len(value) > 1:
            _refuse(pointer, "of several schemas none is kept to")
        case "oneOf":
            if not all(_apart(one, other) for one, other in combinations(value, 2)):
                _refuse(pointer, "two of its schemas may hold at once, or cannot be told apart")
            return {**{name: found[name] for name in found if name != key}, "anyOf": value}
    return found


def _typed(found: Schema, at: str) -> Schema:
    """A schema of rules about types; without any of them, one for each type that it has rules for."""
    if "type" not in found:
        ruled = sorted({_RULES[key] for key in found if key in _RULES})
        if not ruled:
            return found
        found = {**found, "type": ruled[0] if len(ruled) == 1 else ruled}
    types = found["type"] if isinstance(found["type"], list) else [found["type"]]
    if not types:
        _refuse(f"{at}/type", "no type is possible")
    if "string" in types:
        _check_string(found, at)
    if "number" in types or "integer" in types:
        _check_number(found, at, whole="number" not in types)
    return _object(found, at) if "object" in types else found


def _check_string(found: Schema, at: str) -> None:
    rules = [key for key in ("format", "pattern", "minLength", "maxLength") if key in found]
    if "format" in found and found["format"] not in _FORMATS:
        _refuse(f"{at}/format", f"the format {found['format']!r} is not known")
    if len(rules) > 1 and rules[0] in ("format", "pattern"):
        _refuse(f"{at}/{rules[1]}", f"beside {rules[0]} it is not kept to")


def _check_number(found: Schema, at: str, *, whole: bool) -> None:
    bounds = {key: found[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in found}
    if "multipleOf" in found:
        step = found["multipleOf"]
        if not whole or bounds or not isinstance(step, int) or not 0 < step <= _MOST_MULTIPLE:
            about = f"only integers without bounds keep to it, and to a whole number up to {_MOST_MULTIPLE}"
            _refuse(f"{at}/multipleOf", about)
    for key, bound in bounds.items():
        if not _TYPES["number"](bound):
            _refuse(f"{at}/{key}", "it must be a number")
        if not whole and round(bound, 6) != bound:
            _refuse(f"{at}/{key}", "bounds have at most six decimals")
    low = max((bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds), default=None)
    high = min((bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds), default=None)
    if not whole and low is not None and high is not None and high - low < _NEAREST:
        _refuse(f"{at}/{next(iter(bounds))}", f"bounds must be {_NEAREST} apart")


def _object(found: Schema, at: str) -> Schema:
    """An object's names are kept to if each is of one kind: listed, or matching one pattern, or any other."""
    properties = found.get("properties", {})
    patterns = found.get("patternProperties", {})
    others = found.get("additionalProperties", True)
    if "propertyNames" in found and (properties or patterns):
        _refuse(f"{at}/propertyNames", "beside names that are listed it is not kept to")
    if patterns and (len(patterns) > 1 or others is not False or _matching(properties, patterns)):
        about = "only one pattern is kept to, without additionalProperties, and that no listed name matches"
        _refuse(f"{at}/patternProperties", about)
    required = found.get("required", [])
    missing = [name for name in required if name not in properties]
    if not missing:
        return found
    if others is False or patterns or "propertyNames" in found:
        _refuse(f"{at}/required", f"{missing[0]!r} is not among the properties")
    return {**found, "properties": {**properties, **dict.fromkeys(missing, others)}}


def _matching(names: Schema, patterns: Schema) -> bool:
    try:
        return any(re.search(pattern, name) for pattern in patterns for name in names)
    except re.error:
        return True


def _apart(one: Any, other: Any) -> bool:
    """Whether no value can be both."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(_same(a, b) for a in values for b in others)
    if _kinds(one) and _kinds(other) and not _kinds(one) & _kinds(other):
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    return _kinds(one) == _kinds(other) == {"object"} and any(
        _apart(mine.get(name), theirs.get(name)) for name in shared
    )


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _values(schema: Schema) -> list[Any] | None:
    """All there are, where they are listed."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Schema) -> set[str]:
    """Its types, integers as numbers; empty if that is not known."""
    if (values := _values(schema)) is not None:
        return {next(name for name, fits in _TYPES.items() if fits(value)) for value in values}
    if any(key in schema for key in _WHOLE) or "type" not in schema:
        return set()
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if kind == "integer" else str(kind) for kind in types}


def _none(value: Any) -> bool:
    return False


def _refuse(pointer: str, why: str) -> NoReturn:
    raise GrammarError(f"the schema is not served at {pointer}: {why}")
