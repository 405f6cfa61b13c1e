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
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from octavo.core.messages import Chat, Grammar, Ids, Params, Prompt, Sampling, Text
from octavo.plugins.openai import items, structure
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    Message,
    ResponsesBody,
    StreamOptions,
    TokenizeBody,
)
from octavo.plugins.tools.contract import Form

Body = TypeVar("Body", ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)

MAX_PROMPTS = 2048
COMPLETION_MAX_TOKENS = 16
"""What `/v1/completions` generates where `max_tokens` is absent, as in OpenAI's API."""

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
    deadline_ms: int | None = None
    shown: int = 1
    """Choices that are shown for each prompt, the best ones where more are generated (`best_of`)."""
    shows_logprobs: bool = False
    echo: bool = False
    """Each choice begins with its prompt."""
    scores_only: bool = False
    """What is generated is not shown: `max_tokens: 0` with log-probabilities of the prompt."""
    continuous_usage: bool = False
    tools: frozenset[str] = frozenset()
    """Names of the functions that the model may call."""
    one_call: bool = False
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """What a response tells of its request (`/v1/responses`)."""
    must: structure.Must | None = None
    """The whole answer is a call, in this form."""


class TokenizeAsked(NamedTuple):
    model: str | None
    prompt: Prompt
    add_special_tokens: bool
    ignored: list[str]


class DetokenizeAsked(NamedTuple):
    model: str | None
    ids: list[int]
    ignored: list[str]


def chat(body: bytes, form: Form | None = None) -> Asked:
    """`/v1/chat/completions`. Of two limits on the output, `max_completion_tokens` holds: the newer one.

    `form` is how the model marks its calls, where an answer can be held to a grammar that knows it."""
    return _chat_asked(parse(body), form)


def responses(body: bytes, form: Form | None = None) -> Asked:
    """`/v1/responses`: as the chat that asks for the same."""
    raw = parse(body)
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if raw.get(name):
            raise invalid(name, f"{name} is not served: responses are not stored here", "unsupported_parameter")
    request, ignored = _convert(raw, ResponsesBody)
    asked = _chat_asked(items.as_chat(request), form)
    return asked._replace(ignored=[*ignored, *asked.ignored], settings=items.settings(request))


def _chat_asked(raw: dict[str, Any], form: Form | None) -> Asked:
    request, ignored = _convert(raw, ChatBody)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only possible with logprobs: true")
    prompt = _chat(request)
    ignored += _unknown_in_messages(raw)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    asked = _asked(request, [prompt], limit, logprobs, ignored)
    names = frozenset(tool["function"]["name"] for tool in prompt.tools or ())
    one_call = request.parallel_tool_calls is False
    must = structure.must_call(request.tool_choice, prompt.tools or [], one_call=one_call)
    asked = asked._replace(tools=names, one_call=one_call, must=must)
    own = asked.params.sampling.grammar
    if must is not None and own is not None:
        raise invalid("tool_choice", f"tool_choice and {structure.FIELDS} exclude each other")
    if must is not None:
        return _held(asked, must.grammar)
    held = structure.strict_calls(prompt.tools or [], form) if form is not None and own is None else None
    if held is not None:
        return _held(asked, held)
    strict = [f"tools[{i}].function.strict" for i, tool in enumerate(request.tools or ()) if tool.function.strict]
    return asked._replace(ignored=[*asked.ignored, *strict])


def _held(asked: Asked, grammar: Grammar) -> Asked:
    sampling = msgspec.structs.replace(asked.params.sampling, grammar=grammar)
    return asked._replace(params=msgspec.structs.replace(asked.params, sampling=sampling))


def completion(body: bytes) -> Asked:
    """`/v1/completions`."""
    request, ignored = _convert(parse(body), CompletionBody)
    limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    logprobs = -1 if request.logprobs is None else request.logprobs
    asked = _asked(request, prompts(request.prompt), limit, logprobs, ignored)
    params, n = asked.params, request.n or 1
    most = request.best_of or n
    if most < n:
        raise invalid("best_of", f"best_of is {most}, less than n, {n}")
    if most > n:
        if asked.stream:
            raise invalid("best_of", "best_of more than n is not possible with stream: the best is known at the end")
        sampling = msgspec.structs.replace(params.sampling, logprobs=max(logprobs, 0))
        params = msgspec.structs.replace(params, n=most, sampling=sampling)
    if request.echo and logprobs >= 0:
        sampling = msgspec.structs.replace(params.sampling, prompt_logprobs=logprobs)
        params = msgspec.structs.replace(params, sampling=sampling, max_tokens=max(limit, 1))
        asked = asked._replace(scores_only=limit == 0)
    return asked._replace(params=params, echo=bool(request.echo))


def tokenize(body: bytes) -> TokenizeAsked:
    """`/tokenize`: of a prompt, or of messages as the chat template renders them."""
    raw = parse(body)
    request, ignored = _convert(raw, TokenizeBody)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if request.messages is not None:
        prompt: Prompt = Chat(conversation(request.messages))
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


def _chat(request: ChatBody) -> Chat:
    """The conversation, with the tools that may be used."""
    turns = conversation(request.messages)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    if continues and (turns[-1]["role"] != "assistant" or turns[-1].get("tool_calls")):
        raise invalid("continue_final_message", "only a last message of the assistant, without calls, can be continued")
    return Chat(
        turns,
        _tools(request),
        add_generation_prompt=request.add_generation_prompt is not False,
        continues=continues,
        variables=request.chat_template_kwargs or {},
    )


def _tools(request: ChatBody) -> list[dict[str, Any]] | None:
    """The functions on offer; None if there are none, or none may be called."""
    tools, choice = request.tools or [], request.tool_choice
    if choice not in (None, "none") and not tools:
        raise invalid("tool_choice", "tool_choice says how to use tools, but there are none")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "two tools have the same name")
    return [_without_null(msgspec.to_builtins(tool)) for tool in tools] if tools and choice != "none" else None


def _without_null(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {"type": "function", "function": function}


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
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
            calls = enumerate(message.tool_calls)
            turn["tool_calls"] = [_call(call, f"messages[{i}].tool_calls[{k}]") for k, call in calls]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        turns.append(turn)
    return turns


def _call(call: dict[str, Any], path: str) -> dict[str, Any]:
    """An earlier call; templates take its arguments as an object, the API has them as JSON."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{path}.function", f"{path}.function must be an object with a name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what is no JSON stays as the model wrote it
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


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
        bad_words=tuple(request.bad_words or ()),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        keep_s=request.cache_keep_s or 0.0,
    )
    options = request.stream_options or StreamOptions()
    return Asked(
        request.model,
        prompts,
        params,
        stream,
        bool(options.include_usage),
        request.priority or 0,
        ignored,
        deadline_ms=request.deadline_ms,
        shown=request.n or 1,
        shows_logprobs=logprobs >= 0,
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
    )


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
        bias=_biases(request.logit_bias or {}),
        allowed=tuple(request.allowed_token_ids or ()),
        min_tokens=request.min_tokens or 0,
        grammar=structure.asked(request),
    )


def _biases(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise invalid("logit_bias", f"logit_bias has the key {token[:40]!r}: it must be a token id")
    return {int(token): bias for token, bias in given.items()}


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
