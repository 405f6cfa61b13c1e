"""Grammars through the llguidance library: JSON, JSON Schema, regular expressions, choices, Lark grammars, and calls in
free text.

What it adds to the library: a schema keyword that is not served is named with its JSON pointer; white space between
JSON's tokens is bounded, since a model may otherwise write it for ever; repetitions that would take too long are
refused.
"""

from __future__ import annotations

import json
import re

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.core.grammar import Calls, GrammarError, Mask
from octavo.core.messages import Grammar
from octavo.core.models.locate import locate
from octavo.core.tokenizer import ghost
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.plugins.grammars.schemas import MOST_SPACE, check_length, check_regex, place, read_schema

MAX_REPEAT = 4096
MOST_TEXT = 131_072
"""Characters of a grammar: at this the library takes a second or two, and grows with the square."""

WHITE_SPACE = rf"[ \n\t]{{0,{MOST_SPACE}}}"

_INNER_SCHEMA = re.compile(r"%json\s*\{(\s*\})?")

_LIMITS = LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=50_000)
"""A tenth of what the library allows: a step of everyone waits for this."""


class Llguidance:
    """The engine; made once per process."""

    def __init__(self) -> None:
        self._bytes = LLTokenizer(ghost.byte_tokenizer().to_str(), n_vocab=ghost.SIZE, eos_token=ghost.EOS_ID)

    def check(self, grammar: Grammar) -> None:
        source = _source(grammar)
        error = LLMatcher.validate_grammar(source)
        if not error and grammar.kind != "lark":  # that may name tokens of the model
            error = self._no_beginning(source)
        if error:
            raise GrammarError(_told(grammar, error))

    def _no_beginning(self, source: str) -> str:
        """Why there is no first byte of an answer, if there is none."""
        matcher = LLMatcher(self._bytes, source, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()
        return matcher.get_error().replace("NoExtensionBias", "there is nothing that it allows")

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
    check_length(grammar, MOST_TEXT)
    match grammar.kind:
        case "schema":
            read_schema(text, MAX_REPEAT)
            return _schema_source(text)
        case "regex":
            check_regex(text, "", MAX_REPEAT)
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in json.loads(text)))
        case "lark":
            return LLMatcher.grammar_from_lark(_INNER_SCHEMA.sub(_bounded, text))
        case "calls":
            lark = _calls(msgspec.json.decode(text, type=Calls))
            return LLMatcher.grammar_from_lark(_INNER_SCHEMA.sub(_bounded, lark))


def _calls(calls: Calls) -> str:
    """The library has a lazy rule for text up to a mark, and an intersection for text without it."""
    mark = re.escape(calls.opening).replace("/", "\\/")
    any_text = r"(.|\n)*"
    kinds = [f"{json.dumps(one.begin)} %json {json.dumps(one.schema)} {json.dumps(one.end)}" for one in calls.kinds]
    rules = {
        "start": "(before call)* TEXT",
        "before[lazy]": f"/{any_text}{mark}/",
        "TEXT": f"/{any_text}/ & ~/{any_text}{mark}{any_text}/",
        "call": f"SPACE ({' | '.join(kinds)}) SPACE {json.dumps(calls.closing)}",
        "SPACE": r"/[ \n]{0,4}/",
    }
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def _bounded(found: re.Match[str]) -> str:
    """A schema inside a Lark grammar, with the same bound on its white space."""
    bound = json.dumps({"whitespace_pattern": WHITE_SPACE})
    return f'%json {{"x-guidance": {bound}' + (found[1] or ", ")


def _told(grammar: Grammar, error: str) -> str:
    """The library's reason, with the pointer of what it is about."""
    lines = error.strip().splitlines() or ["it is not valid"]
    first = next((line for line in lines if line.startswith("error: ")), lines[0])[:300]
    if grammar.kind == "calls":
        return _told_of_calls(msgspec.json.decode(grammar.text, type=Calls), first)
    if grammar.kind != "schema":
        return f"the {grammar.kind} is not served: {first}"
    return f"the schema is not served at {place(json.loads(grammar.text), _is_served)}: {first}"


def _told_of_calls(calls: Calls, first: str) -> str:
    """Of the function whose arguments are not served alone."""
    for one in calls.kinds:
        if isinstance(one.schema, dict) and not _is_served(one.schema):
            return f"the schema of {one.name} is not served at {place(one.schema, _is_served)}: {first}"
    return f"the calls are not served: {first}"


def _is_served(schema: dict[str, object]) -> bool:
    try:
        return not LLMatcher.validate_grammar(_schema_source(json.dumps(schema)))
    except GrammarError:
        return False


def _schema_source(text: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})
    except ValueError as error:  # of what Python takes for JSON and the library does not: nested too deeply
        raise GrammarError(f"the schema is not served at /: {error}") from error
