"""Grammars through the xgrammar library (Dong et al., 2024): the same kinds as the default engine's.

What it adds to the library: a schema keyword that the library would pass over is refused with its JSON pointer
(`kept`), as are anchors and escapes that it would misread; white space between JSON's tokens is bounded, also in
grammars with schemas in them; masks are made when a state is first met, not all of them before the first token.

The library imports torch, which no other process than the executor has otherwise: so it is imported only here, and only
by who has chosen this engine. It is optional; `./dev setup` installs it.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from octavo.core.grammar import Calls, GrammarError, Mask
from octavo.core.messages import Grammar
from octavo.core.models.locate import locate
from octavo.core.plugins import PluginError
from octavo.core.tokenizer import ghost
from octavo.core.tokenizer.vocabulary import load_vocabulary
from octavo.plugins.grammars.kept import kept
from octavo.plugins.grammars.schemas import MOST_SPACE, check_length, check_regex, escaped, place, read_schema

MAX_REPEAT = 256
"""The library's time for a counted repetition grows with its square: at this it is tens of milliseconds."""

MOST_TEXT = 65_536
MOST_LARK = 16_384
MOST_REGEX = 2048
"""Characters of a grammar: of one, most things take the library some ten microseconds each, but what may be left out of
a regular expression or a rule takes the square of how often."""

MOST = {"values": 1000, "alternatives": 256, "multiples": 4096, "patterns": 100, "bounds": 200}
"""In all of a schema, since each takes the library a millisecond or its number squared: values in `enum`, schemas in
`oneOf`, the sum of all `multipleOf`, patterns, and bounds of numbers that are not whole."""

MOST_BYTES = 64 * 2**20
"""Of compiled grammars with the masks that are known so far; the last one stays whatever it takes."""

_INNER_SCHEMA = re.compile(r"%json\s*(?=[{tf])")
_CHARACTERS = r"[^\"\\\r\n]"
_NO_CONTROLS = r"[^\0-\x1f\"\\\r\n]"
"""A string with a length may hold control characters, says the library; JSON says no."""

_WHERE = re.compile(r"^\[[\d:]+\] \S+: ")


class Xgrammar:
    """The engine; made once per process. Raises `PluginError`."""

    def __init__(self) -> None:
        try:
            self._library: Any = import_module("xgrammar")
        except ImportError as error:
            raise PluginError(f"octavo.grammar plugin 'xgrammar' needs the package xgrammar: {error}") from error
        self._source = _Source(self._library)
        self._bytes = self.load("ghost", ghost.SIZE)

    def check(self, grammar: Grammar) -> None:
        if grammar.kind == "lark":  # it may name tokens of the model
            self._source.of(grammar)
        else:
            self._bytes.start(grammar).mask()

    def load(self, model: str, vocab_size: int) -> Loaded:
        vocabulary = load_vocabulary(locate(model))
        # Without text a token is a special one to the library: no grammar but its end lets it come.
        texts = [b"" if i in vocabulary.special_ids else vocabulary.token_bytes(i) for i in range(vocab_size)]
        ends = list(vocabulary.eos_ids)
        raw = self._library.VocabType.RAW
        return Loaded(
            self._library,
            self._source,
            self._library.TokenizerInfo(texts, raw, vocab_size=vocab_size, stop_token_ids=ends),
        )


class Loaded:
    def __init__(self, library: Any, source: _Source, vocabulary: Any) -> None:
        self._library = library
        self._source = source
        self._vocab_size: int = vocabulary.vocab_size
        self._ends = np.zeros(self._vocab_size, dtype=np.bool_)
        self._ends[vocabulary.stop_token_ids] = True
        self._compiler = library.GrammarCompiler(
            vocabulary, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True
        )
        self._compiled: dict[Grammar, Any] = {}
        """The last grammars, with the masks that have been needed: many requests ask for the same one."""

    def start(self, grammar: Grammar) -> Walk:
        if (compiled := self._compiled.pop(grammar, None)) is None:
            source = self._source.of(grammar)
            try:
                compiled = self._compiler.compile_grammar(source)
            except RuntimeError as error:
                raise GrammarError(f"the {grammar.kind} is not served: {_reason(error)}") from error
        self._compiled[grammar] = compiled
        while len(self._compiled) > 1 and sum(one.memory_size_bytes for one in self._compiled.values()) > MOST_BYTES:
            del self._compiled[next(iter(self._compiled))]
        return Walk(self._library.GrammarMatcher(compiled), self._vocab_size, self._ends)


class Walk:
    """A matcher over one answer."""

    def __init__(self, matcher: Any, size: int, ends: Mask) -> None:
        self._matcher = matcher
        self._size = size
        self._ends = ends
        self._words = np.zeros((1, -(-size // 32)), dtype=np.int32)
        self._lost: int | None = None
        """The token that the grammar did not let come."""

    def take(self, tokens: list[int]) -> None:
        for token in tokens:
            if self._lost is not None or self._matcher.is_terminated():
                return
            if not self._matcher.accept_token(token):
                self._lost = token

    def mask(self) -> Mask:
        if self._lost is not None:
            raise GrammarError(f"the answer cannot go on in its grammar: it has token {self._lost}, which may not come")
        if self._matcher.is_terminated():
            return self._ends
        self._words[:] = -1  # the library leaves it alone where everything may come
        self._matcher.fill_next_token_bitmask(self._words)
        mask = np.unpackbits(self._words.view(np.uint8)[0], bitorder="little")[: self._size].astype(np.bool_)
        if not mask.any():
            raise GrammarError("the answer cannot go on in its grammar: no token may come")
        return mask


class _Source:
    """Grammars in the library's own form; each raises `GrammarError`."""

    def __init__(self, library: Any) -> None:
        self._grammar = library.Grammar

    def of(self, grammar: Grammar) -> Any:
        text = grammar.text
        check_length(grammar, {"regex": MOST_REGEX, "lark": MOST_LARK}.get(grammar.kind, MOST_TEXT))
        try:
            match grammar.kind:
                case "schema":
                    return self._schema(text)
                case "regex":
                    check_regex(text, "", MAX_REPEAT)
                    if why := misread(text):
                        raise GrammarError(f"the regex is not served: {why}")
                    return self._grammar.from_regex(text)
                case "choice":
                    words = " | ".join(json.dumps(one) for one in json.loads(text))
                    return self._grammar.from_lark(f"start: {words}")
                case "lark":
                    return self._lark(text, {})
                case "calls":
                    return self._calls(msgspec.json.decode(text, type=Calls))
        except RuntimeError as error:  # the library's; Python's own, of what is nested too deeply, is one as well
            raise GrammarError(f"the {grammar.kind} is not served: {_reason(error)}") from error

    def _schema(self, text: str) -> Any:
        schema = read_schema(text, MAX_REPEAT)
        _check_size(schema)
        said = kept(schema)
        try:
            return self._json(said)
        except RuntimeError as error:
            where = place(schema, self._is_served)
            raise GrammarError(f"the schema is not served at {where}: {_reason(error)}") from error

    def _json(self, said: Any) -> Any:
        """Raises RuntimeError."""
        made = self._grammar.from_json_schema(json.dumps(said), strict_mode=False, max_whitespace_cnt=MOST_SPACE)
        text = str(made)
        return self._grammar.from_ebnf(text.replace(_CHARACTERS, _NO_CONTROLS)) if _CHARACTERS in text else made

    def _is_served(self, schema: dict[str, Any]) -> bool:
        try:
            self._json(kept(schema))
        except (RuntimeError, GrammarError):
            return False
        return True

    def _lark(self, text: str, named: dict[str, Any]) -> Any:
        """A Lark grammar over grammars that it names; the schemas in it become such. Raises RuntimeError."""
        parts, end = [], 0
        for found in _INNER_SCHEMA.finditer(text):
            if found.start() < end:
                continue
            try:
                schema, after = json.JSONDecoder().raw_decode(text, found.end())
            except ValueError as error:
                raise GrammarError(f"the lark is not served: what follows %json is not valid JSON: {error}") from error
            name = f"schema_{len(named)}"
            named[name] = self._schema(json.dumps(schema))
            parts += [text[end : found.start()], f"@{name}"]
            end = after
        return self._grammar.from_lark("".join([*parts, text[end:]]), named_grammars=named)

    def _calls(self, calls: Calls) -> Any:
        """The library has a lazy rule for text up to a mark; after it, text has no mark any more."""
        schemas = {}
        for number, one in enumerate(calls.kinds):
            try:
                schemas[f"arguments_{number}"] = self._schema(json.dumps(one.schema))
            except GrammarError as error:
                raise GrammarError(f"of {one.name}: {error}") from error
        kinds = [
            f"{json.dumps(one.begin)} @{name} {json.dumps(one.end)}"
            for name, one in zip(schemas, calls.kinds, strict=True)
        ]
        rules = {
            "start": "call* rest",
            "before[lazy]": f"TEXT {json.dumps(calls.opening)}",
            "call": f"before SPACE ({' | '.join(kinds)}) SPACE {json.dumps(calls.closing)}",
            "rest": "TEXT",
            "TEXT": r"/(.|\n)*/",
            "SPACE": r"/[ \n]{0,4}/",
        }
        return self._lark("\n".join(f"{name}: {rule}" for name, rule in rules.items()), schemas)


def misread(pattern: str) -> str | None:
    """What the library would pass over in a regular expression, or take for something else; None if nothing."""
    depth, inside, i = 0, False, 0
    while i < len(pattern):
        char, here = pattern[i], i
        i += 1
        if char == "\\":
            following = pattern[i : i + 1]
            if following.isalpha() and following not in "dDwWsSnrtfvxu":
                return f"the escape \\{following} at {here} is not kept to"
            i += 1
        elif inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "^" and (depth or (here and pattern[here - 1] != "|")):
            return f"the anchor ^ at {here} is not kept to: it may only begin the whole or an alternative of it"
        elif char == "$" and (depth or (i < len(pattern) and pattern[i] != "|")):
            return f"the anchor $ at {here} is not kept to: it may only end the whole or an alternative of it"
    return None


def _check_size(schema: Any) -> None:
    """Raises `GrammarError` where the library would take seconds, and for patterns that it would misread."""
    found = dict.fromkeys(MOST, 0)
    rest = [("", schema)]
    while rest:
        at, one = rest.pop()
        if isinstance(one, list):
            rest += [(f"{at}/{i}", item) for i, item in enumerate(one)]
        if not isinstance(one, dict):
            continue
        for key, value in one.items():
            where = f"{at}/{escaped(key)}"
            what, n = _counted(one, key, value)
            found[what] += n
            if found[what] > MOST[what]:
                raise GrammarError(f"the schema is not served at {where}: there are more than {MOST[what]} {what}")
            for name, pattern in _patterns(key, value):
                if len(pattern) > MOST_REGEX:
                    raise GrammarError(f"the schema is not served at {where}: it has more than {MOST_REGEX} characters")
                if why := misread(pattern):
                    raise GrammarError(f"the schema is not served at {where}{name}: {why}")
            rest.append((where, value))


def _counted(schema: dict[str, Any], key: str, value: Any) -> tuple[str, int]:
    """What of `MOST` a keyword adds to, and how much."""
    match key:
        case "enum" | "oneOf" if isinstance(value, list):
            return ("values" if key == "enum" else "alternatives"), len(value)
        case "multipleOf" if isinstance(value, int):
            return "multiples", value
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if schema.get("type") != "integer":
            return "bounds", 1
    return "patterns", len(_patterns(key, value))


def _patterns(key: str, value: Any) -> list[tuple[str, str]]:
    """The regular expressions of a keyword, each with its pointer within it."""
    if key == "pattern" and isinstance(value, str):
        return [("", value)]
    if key == "patternProperties" and isinstance(value, dict):
        return [(f"/{escaped(name)}", name) for name in value]
    return []


def _reason(error: RuntimeError) -> str:
    """The library's own, in a line."""
    lines = _WHERE.sub("", str(error)).strip().splitlines()
    return lines[0][:300] if lines else "it is not valid"
