"""Grammars through the llguidance library: JSON, JSON Schema, regular expressions, choices and Lark grammars.

What it adds to the library: a schema keyword that is not served is named with its JSON pointer; white space between
JSON's tokens is bounded, since a model may otherwise write it for ever; repetitions that would take too long are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.core.grammar import GrammarError, Mask
from octavo.core.messages import Grammar
from octavo.core.models.locate import locate
from octavo.core.tokenizer.vocabulary import load_vocabulary

MAX_REPEAT = 4096
MOST_PARTS = 64
MOST_CHARACTERS = 50_000
WHITE_SPACE = r"[ \n\t]{0,20}"

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Their values are schemas by name."""

_VALUES = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired", "x-guidance"})
"""Their values are none."""

_INNER_SCHEMA = re.compile(r"%json\s*\{(\s*\})?")

_LIMITS = LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=50_000)
"""A tenth of what the library allows: a step of everyone waits for this."""

_SAYS_SOMETHING = {
    "$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "properties", "patternProperties",
    "additionalProperties", "required", "items", "prefixItems", "minItems", "maxItems", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "title", "$defs", "definitions", "$schema", "$id", "description", "default", "examples",
    "minProperties", "maxProperties", "propertyNames", "contains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "x-guidance",
}  # fmt: skip
"""Keywords of JSON Schema. Others mean nothing, but a schema of nothing else is none."""


class Llguidance:
    """The engine; made once per process."""

    def check(self, grammar: Grammar) -> None:
        source = _source(grammar)
        if error := LLMatcher.validate_grammar(source):
            raise GrammarError(_told(grammar, error))

    def load(self, model: str, vocab_size: int) -> Loaded:
        vocabulary = load_vocabulary(locate(model))
        ends = list(vocabulary.eos_ids)
        return Loaded(LLTokenizer(vocabulary.tokenizer.to_str(), n_vocab=vocab_size, eos_token=ends))


class Loaded:
    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[Grammar, LLMatcher] = {}
        """The last grammars at their beginnings: many requests ask for the same one."""

    def start(self, grammar: Grammar) -> Walk:
        if (fresh := self._compiled.get(grammar)) is None:
            fresh = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
            if fresh.is_error():
                raise GrammarError(_told(grammar, fresh.get_error()))
            if len(self._compiled) >= 64:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar] = fresh
        return Walk(fresh.deep_copy(), self._tokenizer.vocab_size)


class Walk:
    """A matcher over one answer."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def take(self, tokens: list[int]) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(tokens)

    def mask(self) -> Mask:
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(f"the answer cannot go on in its grammar: {self._matcher.get_error()[:300]}")
        return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[: self._size].astype(np.bool_)


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own form. Raises `GrammarError`."""
    text = grammar.text
    match grammar.kind:
        case "schema":
            _check_schema(text)
            return _schema_source(text)
        case "regex":
            _check_regex(text, "")
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in json.loads(text)))
        case "lark":
            return LLMatcher.grammar_from_lark(_INNER_SCHEMA.sub(_bounded, text))


def _bounded(found: re.Match[str]) -> str:
    """A schema inside a Lark grammar, with the same bound on its white space."""
    bound = json.dumps({"whitespace_pattern": WHITE_SPACE})
    return f'%json {{"x-guidance": {bound}' + (found[1] or ", ")


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema must be an object or a boolean")
    if isinstance(schema, dict) and schema and not _SAYS_SOMETHING & schema.keys():
        raise GrammarError(f"the schema has no keyword of JSON Schema, only {', '.join(sorted(schema))[:200]}")
    for pointer, key, value in _walk(schema, ""):
        if key == "pattern" and isinstance(value, str):
            _check_regex(value, f" at {pointer}")


def _check_regex(text: str, where: str) -> None:
    """What the library would take, but means nothing or would compute for ever."""
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
        if within * around > MAX_REPEAT:
            raise GrammarError(f"the regular expression{where} repeats more than {MAX_REPEAT} times: {found[0][:40]}")


def _told(grammar: Grammar, error: str) -> str:
    """The library's reason, with the pointer of what it is about."""
    lines = error.strip().splitlines() or ["it is not valid"]
    first = next((line for line in lines if line.startswith("error: ")), lines[0])[:300]
    if grammar.kind != "schema":
        return f"the {grammar.kind} is not served: {first}"
    return f"the schema is not served at {_place(json.loads(grammar.text))}: {first}"


def _place(schema: Any) -> str:
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
        if not _is_served(whole):
            without = (key for key in part if _is_served({name: whole[name] for name in whole if name != key}))
            alone = (key for key in part if not _is_served({**shared, key: part[key]}))
            key = next(chain(without, alone), None)
            return pointer or "/" if key is None else f"{pointer}/{_escaped(key)}"
    return "/"


def _is_served(schema: dict[str, Any]) -> bool:
    return not LLMatcher.validate_grammar(_schema_source(json.dumps(schema)))


def _schema_source(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})


def _parts(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in it, an outer one before its inner ones."""
    yield pointer, schema
    for key, value in schema.items():
        at = f"{pointer}/{_escaped(key)}"
        if key in _MAPS and isinstance(value, dict):
            inner = [(f"{at}/{_escaped(name)}", item) for name, item in value.items()]
        elif key in _VALUES:
            inner = []
        elif isinstance(value, list):
            inner = [(f"{at}/{i}", item) for i, item in enumerate(value)]
        else:
            inner = [(at, value)]
        for path, item in inner:
            if isinstance(item, dict):
                yield from _parts(item, path)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _walk(value: Any, pointer: str) -> Iterator[tuple[str, str, Any]]:
    """Every key of every object in it, with its JSON pointer."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        path = f"{pointer}/{_escaped(str(key))}"
        yield path, str(key), item
        yield from _walk(item, path)
