"""What shape an answer must have, from the fields that ask for one: a grammar for the engine. Pure.

response_format                          OpenAI's
structured_outputs, guided_*             vLLM's: a schema, a regular expression, a choice of texts, a Lark grammar
tool_choice: required, or a function     the answer is nothing but calls
strict functions under auto              what stands between the marks of a call keeps to its function's schema
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from octavo.core.grammar import CallKind, Calls
from octavo.core.messages import Grammar
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import Generation, ResponseFormat
from octavo.plugins.tools.calls import bare_json
from octavo.plugins.tools.contract import Call, Content, Form, Parser, Said

FIELDS = "response_format, structured_outputs or guided_*"
MOST_CALLS = 8
ANY_SCHEMA = {"type": "object"}
ANY_OBJECT = Grammar("schema", json.dumps(ANY_SCHEMA))
_HEAD = '{"name": %s, "arguments": '


def asked(request: Generation) -> Grammar | None:
    """The one shape that is asked for, if any is."""
    found = [*_response_format(request.response_format)]
    nested = request.structured_outputs
    if nested is not None:
        found += _guided("structured_outputs", nested.json, nested.regex, nested.choice, nested.grammar)
        found += [ANY_OBJECT] if nested.json_object else []
    guided = (request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    found += _guided("guided_choice", *guided)
    if len(found) > 1:
        raise invalid("response_format", f"only one of {FIELDS} is possible, there are {len(found)}")
    return found[0] if found else None


def _response_format(given: ResponseFormat | None) -> list[Grammar]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [ANY_OBJECT]
    if given.json_schema is None:
        field = "response_format.json_schema"
        raise invalid(field, f"{field} is missing", "missing_required_parameter")
    return [Grammar("schema", json.dumps(given.json_schema.schema))]


def _guided(field: str, schema: Any, regex: str | None, choice: list[str] | None, lark: str | None) -> list[Grammar]:
    found: list[Grammar] = []
    if schema is not None:
        found.append(Grammar("schema", schema if isinstance(schema, str) else json.dumps(schema)))
    if regex is not None:
        found.append(Grammar("regex", regex))
    if choice is not None:
        if "" in choice:
            raise invalid(field, f"{field}: one of the choices is empty")
        found.append(Grammar("choice", json.dumps(choice)))
    if lark is not None:
        found.append(Grammar("lark", lark))
    return found


class Must(NamedTuple):
    """The answer is calls and nothing else. `name`: of the one function that is called; its arguments are the
    whole answer."""

    grammar: Grammar
    name: str | None = None

    def parser(self, names: frozenset[str]) -> Parser:
        return bare_json(names) if self.name is None else _Arguments(self.name)


def must_call(choice: str | dict[str, Any] | None, tools: list[dict[str, Any]], *, one_call: bool) -> Must | None:
    """What `tool_choice` enforces; None for auto and none."""
    if choice in (None, "auto", "none"):
        return None
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or ANY_SCHEMA for tool in tools}
    if choice == "required":
        return Must(Grammar("schema", json.dumps(_calls(functions, 1 if one_call else MOST_CALLS))))
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        message = f"tool_choice is {json.dumps(choice)[:60]}: it must be auto, none, required or a function"
        raise invalid("tool_choice", message)
    if name not in functions:
        raise invalid("tool_choice", f"tool_choice names {name[:64]!r}, which is not in tools")
    return Must(Grammar("schema", json.dumps(functions[name])), name)


def _calls(functions: dict[str, dict[str, Any]], most: int) -> dict[str, Any]:
    """Schema of a list of calls. Definitions of the functions' own schemas move to its root, where references look."""
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {k: v for k, v in schema.items() if k != "$defs"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in functions.items()
    ]
    definitions = {key: value for schema in functions.values() for key, value in (schema.get("$defs") or {}).items()}
    calls = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": kinds}}
    return {**calls, "$defs": definitions} if definitions else calls


def strict_calls(tools: list[dict[str, Any]], form: Form) -> Grammar | None:
    """Text that is free but for calls: between the marks of `form` stands a function on offer with arguments that keep
    to its schema, or are any object if it is not strict. None if no function is."""
    functions = [tool["function"] for tool in tools]
    if not any(function.get("strict") for function in functions):
        return None
    kinds = [
        CallKind(function["name"], _HEAD % json.dumps(function["name"]), _parameters(function), "}")
        for function in functions
    ]
    return Grammar("calls", msgspec.json.encode(Calls(form.opening, kinds, form.closing)).decode())


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or ANY_SCHEMA if function.get("strict") else ANY_SCHEMA


class _Arguments:
    """The whole answer is the arguments of one call; one that was cut is text."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> list[Said]:
        self._text += text
        return []

    def finish(self) -> list[Said]:
        try:
            whole = isinstance(json.loads(self._text), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole:
            return [Call(self._name, self._text)]
        return [Content(self._text)] if self._text else []
