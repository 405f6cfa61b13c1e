"""JSON schemas: what is written under one validates, and what is not served names where.

Schemas are our own (each keyword by itself, in the way of JSON Schema's test suite), and drawn ones that nest them.
Output is sampled at random from what the masks allow, so it goes where no model would. `--schemas N` draws N.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from octavo.core.grammar import Engine, GrammarError, Grammars
from octavo.core.messages import Grammar
from octavo.core.tokenizer.ghost import EOS_ID
from tests import grammars

KEYWORDS: list[dict[str, Any]] = [
    {"type": "object"}, {"type": "array"}, {"type": "string"}, {"type": "integer"}, {"type": "number"},
    {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "boolean", "array"]},
    {"enum": [1, "two", None, {"three": [3]}]}, {"const": {"a": [1, 'q"uote', "\\"]}}, {"enum": ["👍", "é", "\n"]},
    {"type": "integer", "minimum": -3, "maximum": 12}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "integer", "exclusiveMaximum": 100, "minimum": 95}, {"type": "integer", "multipleOf": 7},
    {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "pattern": "^[a-c]+-[0-9]{2}$"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}, {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "date-time"}, {"type": "string", "format": "email"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 3, "maxItems": 5},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "object"}]},
    {"$defs": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
    {
        "$defs": {"t": {"type": "object", "properties": {"v": {"const": 1}, "next": {"$ref": "#/$defs/t"}}}},
        "$ref": "#/$defs/t",
    },
    {"definitions": {"x y": {"const": "z"}}, "$ref": "#/definitions/x%20y"},
    {"title": "t", "description": "d", "default": 3, "examples": [1], "type": "integer"}, {},
]  # fmt: skip

NOT_SERVED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "integer"}}, "/not"),
    ({"type": "object", "properties": {"a": {"if": {"const": 1}, "then": {"const": 2}}}}, "/properties/a/if"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "/contains"),
    ({"type": "object", "properties": {"b": {}}, "propertyNames": {"pattern": "a"}}, "/propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "/dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "/unevaluatedProperties"),
    ({"type": "array", "unevaluatedItems": False}, "/unevaluatedItems"),
    ({"properties": {"a/b": {"type": "array", "items": {"type": "objekt"}}}}, "/properties/a~1b/items/type"),
    ({"type": "string", "pattern": "("}, "/pattern"),
    ({"type": "string", "format": "color-of-money"}, "/format"),
    ({"$ref": "#/$defs/nowhere"}, "/$ref"),
]  # fmt: skip


BESIDE: list[dict[str, Any]] = [
    {"minimum": 3}, {"minLength": 3}, {"items": {"type": "integer"}, "minItems": 2}, {"required": ["z"]},
    {"properties": {"a": {"type": "integer"}}, "required": ["a", "z"]},
    {"required": ["z"], "additionalProperties": False},
    {"type": ["string", "integer"], "minLength": 3, "minimum": 7}, {"type": "integer", "enum": [1, "a"]},
    {"type": ["integer", "null"], "enum": [1, None, "a"]}, {"const": 3, "type": "string"},
    {"enum": [1, 2], "minimum": 2},
    {"anyOf": [{"type": "integer"}], "minimum": 3}, {"allOf": [{"type": "integer"}], "minimum": 3},
    {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, {"type": "number", "multipleOf": 0.5},
    {"type": "integer", "multipleOf": 7, "minimum": 3, "maximum": 40}, {"type": "integer", "multipleOf": 4096},
    {"type": "number", "minimum": 1e-9, "maximum": 2e-9}, {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "string", "minLength": 2, "pattern": "^a*$"}, {"type": "string", "format": "date", "minLength": 20},
    {"type": "string", "pattern": "a^b"}, {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": r"\Aa\Z"},
    {"type": "object", "properties": {"xa": {"type": "string"}}, "patternProperties": {"^x": {"type": "integer"}}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "propertyNames": {"maxLength": 1}}, {"type": "object", "propertyNames": {"pattern": "^a+$"}},
    {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, {"oneOf": [{"const": 1}, {"const": 2}]},
    {"oneOf": [
        {"type": "object", "properties": {"k": {"const": k}, "v": {}}, "required": ["k"], "additionalProperties": False}
        for k in "ab"
    ]},
    {"type": []}, {"anyOf": []}, {"enum": []}, {"$ref": "#"}, {"$ref": "other.json#/a"},
    {"type": "object", "required": [[1]]},
    {"properties": [1]}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "minProperties": 2},
]  # fmt: skip
"""Keywords together with others, and what is no schema."""


def drawn(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema that nests others."""
    kind = rng.choice(["keyword", "object", "array", "anyOf", "allOf", "ref"] if depth else ["keyword"])
    if kind == "object":
        names = rng.sample(["a", "b", "ü", 'q"', "long name", "n/m", "~"], rng.randint(1, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: drawn(rng, depth - 1) for name in names}}
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
        return schema | rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}])
    if kind == "array":
        least = rng.randint(0, 2)
        bounds = rng.choice([{}, {"minItems": least}, {"minItems": least, "maxItems": least + 2}])
        return {"type": "array", "items": drawn(rng, depth - 1), **bounds}
    if kind == "anyOf":
        return {"anyOf": [drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "allOf":
        return {"allOf": [drawn(rng, depth - 1)]}
    if kind == "ref":
        return {
            "properties": {"r": {"$ref": "#/$defs/d"}},
            "$defs": {"d": {"type": "integer", "maximum": rng.randint(0, 99)}},
        }
    while "$ref" in (schema := rng.choice(KEYWORDS)) or "$defs" in schema:
        pass  # references look at the root, so they stand only there
    return schema


def written(loaded: Grammars, schema: dict[str, Any], rng: random.Random, most: int) -> str | None:
    """A random answer; None if it did not end within `most` tokens. Once it is long, it is led to its end: closing
    marks come first."""
    walk = loaded.start(Grammar("schema", json.dumps(schema)))
    text = bytearray()
    spaces = 0
    while len(text) < most:
        may = walk.mask().nonzero()[0].tolist()
        if EOS_ID in may and (len(text) > 20 or rng.random() < 0.3 or may == [EOS_ID]):
            return text.decode(errors="replace")  # what is no UTF-8 becomes U+FFFD, as everywhere
        letters = [token for token in may if token < 256]
        assert letters, f"a dead end after {bytes(text)!r}"
        closing = [token for token in letters if token in b'}]"']
        token = rng.choice(closing if closing and len(text) > 60 else letters)
        spaces = spaces + 1 if token in b" \n\t" else 0
        text.append(token)
        walk.take([token])
    return None


@pytest.fixture(scope="module", params=grammars.NAMES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return grammars.engine(request.param)


@pytest.fixture(scope="module")
def loaded(engine: Engine) -> Grammars:
    return engine.load("ghost", EOS_ID + 2)


def refusal(engine: Engine, schema: dict[str, Any]) -> str | None:
    try:
        engine.check(Grammar("schema", json.dumps(schema)))
    except GrammarError as error:
        return str(error)
    return None


def judged(engine: Engine, loaded: Grammars, schema: dict[str, Any], seed: int) -> str:
    """`valid`, `long` or `refused`; fails if an answer is not valid."""
    refused = refusal(engine, schema)
    if refused is not None:
        assert " at /" in refused, f"{schema} is refused without a place: {refused}"
        return "refused"
    text = written(loaded, schema, random.Random(seed), 400)
    if text is None:
        return "long"
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    return "valid"


@pytest.mark.parametrize("schema", KEYWORDS, ids=lambda schema: json.dumps(schema)[:60])
def test_each_keyword_is_kept_to(
    engine: Engine, loaded: Grammars, request: pytest.FixtureRequest, schema: dict[str, Any]
) -> None:
    found = [judged(engine, loaded, schema, seed) for seed in range(4)]
    several = engine is not grammars.engine("llguidance") and len(schema.get("allOf", [])) > 1
    assert ("refused" if several else "valid") in found, found


@pytest.mark.parametrize("schema", BESIDE, ids=lambda schema: json.dumps(schema)[:60])
def test_keywords_together_are_kept_to_or_refused_with_a_place(
    engine: Engine, loaded: Grammars, schema: dict[str, Any]
) -> None:
    for seed in range(6):
        judged(engine, loaded, schema, seed)


@pytest.mark.parametrize(("schema", "pointer"), NOT_SERVED, ids=lambda value: str(value)[:50])
def test_what_is_not_served_is_named_by_its_pointer(engine: Engine, schema: dict[str, Any], pointer: str) -> None:
    refused = refusal(engine, schema)
    assert refused is not None
    assert f" at {pointer}:" in refused


def test_a_large_schema_is_refused_as_fast_as_a_small_one(engine: Engine) -> None:
    many = {f"p{i}": {"type": "object", "properties": {"a": {"type": "string"}}} for i in range(400)}
    before = time.thread_time()
    assert refusal(engine, {"type": "object", "properties": {**many, "x": {"type": "objekt"}}}) is not None
    assert time.thread_time() - before < 2.0


COSTLY: dict[str, tuple[dict[str, Any], str]] = {
    "oneOf": ({"oneOf": [{"const": f"value {i}"} for i in range(1000)]}, "/oneOf"),
    "multipleOf": (
        {"items": {"anyOf": [{"multipleOf": 1000 + i, "type": "integer"} for i in range(20)]}},
        "/multipleOf",
    ),
    "bounds": ({"anyOf": [{"type": "number", "minimum": i - 123456.789} for i in range(700)]}, "/minimum"),
    "patterns": ({"anyOf": [{"type": "string", "pattern": f"^a{{1,{i}}}$"} for i in range(1, 200)]}, "/pattern"),
    "a pattern": ({"type": "string", "pattern": "(a|b)?" * 3000}, "/pattern"),
}
"""Within reach of what xgrammar takes, but it would compute for seconds; and where it is refused."""


@pytest.mark.parametrize("what", COSTLY)
def test_what_xgrammar_would_take_seconds_for_is_refused(what: str, engine: Engine) -> None:
    schema, pointer = COSTLY[what]
    refused = refusal(engine, schema)
    if engine is not grammars.engine("llguidance"):
        assert refused is not None
        assert f"{pointer}:" in refused


def test_what_is_too_long_is_refused_before_the_library_sees_it(engine: Engine) -> None:
    """Of 12 000 properties it would be computing still after ten seconds."""
    refused = refusal(engine, {"properties": {f"p{i}": {"type": "string"} for i in range(12_000)}})
    assert refused is not None
    assert "characters" in refused


def test_drawn_schemas_are_kept_to_or_refused_with_a_place(
    engine: Engine, loaded: Grammars, request: pytest.FixtureRequest, pytestconfig: pytest.Config
) -> None:
    n = int(pytestconfig.getoption("--schemas"))
    shared = {"$defs": {"d": {"type": "integer", "maximum": 99}}}
    found = [judged(engine, loaded, {**drawn(random.Random(seed)), **shared}, seed) for seed in range(n)]
    counts = {what: found.count(what) for what in ("valid", "long", "refused")}
    assert counts["valid"] > n / 3, counts
    if n >= 300:
        write(str(request.node.callspec.params["engine"]), n, counts)


def write(engine: str, n: int, counts: dict[str, int]) -> None:
    """The table, with this row in place of the engine's former one."""
    path = Path(__file__).parents[1] / "results" / "schemas.md"
    former = path.read_text().splitlines() if path.exists() else []
    rows = {line.split("|")[1].strip(): line for line in former if line.startswith("| ")}
    rows[engine] = f"| {engine} | {n} | {' | '.join(map(str, counts.values()))} |"
    rows.pop("engine", None)
    about = (
        f"Written by `pytest tests/gateway/test_schemas.py --schemas {n}`: drawn schemas, beside {len(KEYWORDS)} of\n"
        f"single keywords and {len(BESIDE)} of several. Every answer that ended within 400 bytes is valid."
    )
    head = f"| engine | schemas | {' | '.join(counts)} |\n|---|---|{'---|' * len(counts)}"
    path.write_text("\n".join(["# JSON schemas", "", about, "", head, *rows.values(), ""]))


def mutated(rng: random.Random, value: Any) -> Any:
    """The same with something else in one place."""
    junk = [None, -1, 1e999, "x", "(", [[1]], [], {}, {"type": 3}, True, [None], {"$ref": 1}, "#/nowhere", ["a", "a"]]
    if not value or not isinstance(value, dict | list) or rng.random() < 0.2:
        return rng.choice(junk)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    key = rng.choice(list(value))
    return {**value, key: mutated(rng, value[key])}


def test_what_is_no_schema_is_refused_or_means_something(engine: Engine) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        schema = mutated(rng, rng.choice([rng.choice(KEYWORDS), rng.choice(BESIDE), drawn(rng)]))
        with suppress(GrammarError):
            engine.check(Grammar("schema", json.dumps(schema)))
    for depth in (200, 900, 100_000):
        with suppress(GrammarError):
            engine.check(Grammar("schema", '{"items": ' * depth + "{}" + "}" * depth))


def test_white_space_cannot_go_on_for_ever(loaded: Grammars) -> None:
    walk = loaded.start(Grammar("schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    walk.take([ord("{")])
    run = 0
    while walk.mask()[ord(" ")]:
        walk.take([ord(" ")])
        run += 1
    assert 0 < run <= 20
