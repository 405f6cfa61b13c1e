"""The body of a request: one JSON object, converted to its type, and every fault is a 400 that names its field. Pure.

Three kinds of fields beside the ones in `types`: those that OpenAI or other engines know but that are not served
here are refused unless they ask for nothing (an answer that silently lacks a tool call or a bias would be wrong);
unknown ones are ignored and their names reported; null counts as absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    ResponsesBody,
    StreamOptions,
    TokenizeBody,
    UnloadAdapterBody,
)

Body = TypeVar(
    "Body",
    ChatBody,
    CompletionBody,
    ResponsesBody,
    TokenizeBody,
    DetokenizeBody,
    LoadAdapterBody,
    UnloadAdapterBody,
)

NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "chat_template": (),
}
"""Known fields that are not served (by the bodies that do not have them), with the values that ask for nothing (null
always does)."""


def parse(body: bytes) -> dict[str, Any]:
    """The body's JSON object; all its numbers are finite."""
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise invalid(None, "the body is nested too deeply", "invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        field = _non_finite_field(body)
        if field is not None:
            raise invalid(field, f"{field or 'the body'} must be a finite number") from None
        raise invalid(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid(None, f"the body must be a JSON object, not {kind_of(raw)}")
    return raw


def convert(raw: dict[str, Any], kind: type[Body]) -> tuple[Body, list[str]]:
    """The body as its type, and the paths of what it has beside."""
    for name, harmless in NOT_SERVED.items():
        value = raw.get(name)
        if value is not None and value not in harmless and name not in kind.__struct_fields__:
            raise invalid(name, f"{name} is not served here", "unsupported_parameter")
    try:
        body = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    ignored = [name for name in raw if name not in kind.__struct_fields__ and name not in NOT_SERVED]
    options = raw.get("stream_options")
    if isinstance(options, dict):
        ignored += [f"stream_options.{name}" for name in options if name not in StreamOptions.__struct_fields__]
    return body, ignored


def _type_error(text: str) -> Exception:
    """msgspec says where: "Expected `float`, got `str` - at `$.temperature`"."""
    where = re.search(r" - at `\$\.?(?P<path>.*)`$", text)
    path = where["path"] if where else ""
    message = text[: where.start()] if where else text
    missing = re.match(r"Object missing required field `(?P<name>\w+)`$", message)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid(path, f"{path} is missing", "missing_required_parameter")
    return invalid(path or None, f"{path}: {message}" if path else message, "invalid_type_or_value")


def _non_finite_field(body: bytes) -> str | None:
    """Where a body that would be JSON but for NaN, Infinity or 1e999 has it; None if something else is wrong."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return next((path for path, number in _floats(raw, "") if not math.isfinite(number)), None)


def _floats(value: Any, path: str) -> Iterator[tuple[str, float]]:
    match value:
        case float():
            yield path, value
        case dict():
            for name, item in value.items():
                yield from _floats(item, f"{path}.{name}" if path else name)
        case list():
            for i, item in enumerate(value):
                yield from _floats(item, f"{path}[{i}]")


def kind_of(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
