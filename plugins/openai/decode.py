"""From a request's body to what the engine is asked: pure, and every fault is a 400 that names its field.

Three kinds of fields beside the ones in `types`: those that OpenAI or other engines know but that are not served
here are refused unless they ask for nothing (an answer that silently lacks a tool call or a bias would be wrong);
unknown ones are ignored and their names reported; null counts as absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from octavo.core.messages import Chat, Ids, Params, Prompt, Sampling, Text
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    Message,
    StreamOptions,
    TokenizeBody,
)

Body = TypeVar("Body", ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)

MAX_PROMPTS = 2048
COMPLETION_MAX_TOKENS = 16
"""What `/v1/completions` generates where `max_tokens` is absent, as in OpenAI's API."""

NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Known fields that are not served, with the values that ask for nothing (null always does)."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles as the API has them, and as chat templates know them."""


class Asked(NamedTuple):
    """A request to generate, decoded: one engine request per prompt, all with the same parameters."""

    model: str | None
    prompts: list[Prompt]
    params: Params
    stream: bool
    include_usage: bool
    priority: int
    ignored: list[str]
    """Paths of fields that have no effect."""


class TokenizeAsked(NamedTuple):
    model: str | None
    prompt: Prompt
    add_special_tokens: bool
    ignored: list[str]


class DetokenizeAsked(NamedTuple):
    model: str | None
    ids: list[int]
    ignored: list[str]


def chat(body: bytes) -> Asked:
    """`/v1/chat/completions`. Of two limits on the output, `max_completion_tokens` holds: the newer one."""
    raw = parse(body)
    request, ignored = _convert(raw, ChatBody)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only possible with logprobs: true")
    prompt = conversation(request.messages)
    ignored += _unknown_in_messages(raw)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    return _asked(request, [prompt], limit, logprobs, ignored)


def completion(body: bytes) -> Asked:
    """`/v1/completions`."""
    request, ignored = _convert(parse(body), CompletionBody)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise invalid("best_of", f"best_of is {request.best_of} and n is {n}: only equal values are served")
    limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    logprobs = -1 if request.logprobs is None else request.logprobs
    return _asked(request, prompts(request.prompt), limit, logprobs, ignored)


def tokenize(body: bytes) -> TokenizeAsked:
    """`/tokenize`: of a prompt, or of messages as the chat template renders them."""
    raw = parse(body)
    request, ignored = _convert(raw, TokenizeBody)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if request.messages is not None:
        prompt: Prompt = conversation(request.messages)
        ignored += _unknown_in_messages(raw)
    else:
        prompt = Text(request.prompt or "")
    return TokenizeAsked(request.model, prompt, request.add_special_tokens, ignored)


def detokenize(body: bytes) -> DetokenizeAsked:
    """`/detokenize`."""
    request, ignored = _convert(parse(body), DetokenizeBody)
    return DetokenizeAsked(request.model, request.tokens, ignored)


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
        raise invalid(None, f"the body must be a JSON object, not {_kind(raw)}")
    return raw


def conversation(messages: list[Message]) -> Chat:
    """Messages as a chat template takes them, their content flattened to text."""
    turns: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role = ROLES.get(message.role)
        if role is None:
            raise invalid(f"messages[{i}].role", f"unknown role {message.role[:40]!r}: one of {', '.join(ROLES)}")
        turn: dict[str, Any] = {"role": role, "content": _text(message, f"messages[{i}].content")}
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_calls:
            turn["tool_calls"] = message.tool_calls
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        turns.append(turn)
    return Chat(turns)


def prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The four forms: a string, strings, ids, lists of ids."""
    if isinstance(prompt, str):
        return [_text_prompt(prompt, "prompt")]
    if not prompt:
        raise invalid("prompt", "prompt is empty")
    if isinstance(prompt[0], int):
        return [_ids_prompt(prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(prompt)} entries, at most {MAX_PROMPTS} are possible")
    if isinstance(prompt[0], str):
        return [_text_prompt(item, f"prompt[{i}]") for i, item in enumerate(prompt)]
    return [_ids_prompt(item, f"prompt[{i}]") for i, item in enumerate(prompt)]


def _asked(request: Generation, prompts: list[Prompt], limit: int | None, logprobs: int, ignored: list[str]) -> Asked:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options is only possible with stream: true")
    params = Params(
        sampling=_sampling(request, logprobs),
        n=request.n or 1,
        max_tokens=None if limit is None else min(limit, 2**31 - 1),
        stop=_stops(request.stop),
        stop_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
    )
    include_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return Asked(request.model, prompts, params, stream, include_usage, request.priority or 0, ignored)


def _sampling(request: Generation, logprobs: int) -> Sampling:
    """A seed of -1 asks the client library to draw one."""
    default = Sampling()
    top_k = max(request.top_k or 0, 0)
    top_p = _or(request.top_p, default.top_p)
    if top_p == 0:
        # The smallest set whose probability reaches 0 is the likeliest token alone.
        top_k, top_p = 1, 1.0
    return Sampling(
        temperature=_or(request.temperature, default.temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=_or(request.min_p, default.min_p),
        repetition=_or(request.repetition_penalty, default.repetition),
        presence=_or(request.presence_penalty, default.presence),
        frequency=_or(request.frequency_penalty, default.frequency),
        seed=-1 if request.seed is None else request.seed & (2**63 - 1),
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise invalid("stop", "a stop string is empty")
    return stops


def _text_prompt(text: Any, path: str) -> Text:
    if not isinstance(text, str):
        raise invalid(path, f"{path} must be a string like the entries before it, not {_kind(text)}")
    if not text:
        raise invalid(path, f"{path} is empty")
    return Text(text)


def _ids_prompt(ids: Any, path: str) -> Ids:
    if not isinstance(ids, list):
        raise invalid(path, f"{path} must be a string or a list of token ids, not {_kind(ids)}")
    if not ids:
        raise invalid(path, f"{path} is empty")
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise invalid(f"{path}[{i}]", f"{path}[{i}] is not a token id: an integer from 0 on")
    return Ids(ids)


def _text(message: Message, path: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    if not message.content:
        raise invalid(path, f"{path} has no parts")
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(message.content))


def _part(part: dict[str, Any], path: str) -> str:
    if part.get("type") != "text":
        raise invalid(f"{path}.type", f"{path} is a part of type {str(part.get('type'))[:40]!r}: only text is served")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{path}.text", f"{path}.text must be a string, not {_kind(text)}")
    return text


def _convert(raw: dict[str, Any], kind: type[Body]) -> tuple[Body, list[str]]:
    """The body as its type, and the paths of what it has beside."""
    for name, harmless in NOT_SERVED.items():
        value = raw.get(name)
        if value is not None and value not in harmless:
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


def _unknown_in_messages(raw: dict[str, Any]) -> list[str]:
    known = Message.__struct_fields__
    return [f"messages[{i}].{name}" for i, item in enumerate(raw["messages"]) for name in item if name not in known]


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


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
