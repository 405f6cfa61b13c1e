"""`/v1/chat/completions` on its way in, and `/v1/responses` as the chat that asks for the same. Pure."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec

from octavo.core.messages import Chat, Grammar
from octavo.plugins.openai import items, structure
from octavo.plugins.openai.asked import UNSUPPORTED, Asked, to_asked
from octavo.plugins.openai.body import convert, kind_of, parse
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import ChatBody, Message, ResponsesBody
from octavo.plugins.tools.contract import Form

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles as the API has them, and as chat templates know them."""


def decode_chat(body: bytes, form: Form | None = None) -> Asked:
    """`/v1/chat/completions`. Of two limits on the output, `max_completion_tokens` holds: the newer one.

    `form` is how the model marks its calls, where an answer can be held to a grammar that knows it."""
    return _chat_asked(parse(body), form)


def decode_responses(body: bytes, form: Form | None = None) -> Asked:
    """`/v1/responses`: as the chat that asks for the same."""
    raw = parse(body)
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if raw.get(name):
            raise invalid(name, f"{name} is not served: responses are not stored here", "unsupported_parameter")
    request, ignored = convert(raw, ResponsesBody)
    asked = _chat_asked(items.as_chat(request), form)
    return asked._replace(ignored=[*ignored, *asked.ignored], settings=items.settings(request))


def _chat_asked(raw: dict[str, Any], form: Form | None) -> Asked:
    request, ignored = convert(raw, ChatBody)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only possible with logprobs: true")
    prompt = _chat(request)
    ignored += unknown_in_messages(raw)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    asked = to_asked(request, [prompt], limit, logprobs, ignored)
    names = frozenset(tool["function"]["name"] for tool in prompt.tools or ())
    one_call = request.parallel_tool_calls is False
    must = structure.must_call(request.tool_choice, prompt.tools or [], one_call=one_call)
    asked = asked._replace(tools=names, one_call=one_call, must=must)
    own = asked.params.sampling.grammar
    if must is not None and own is not None:
        raise invalid("tool_choice", f"tool_choice and {structure.FIELDS} exclude each other")
    if must is not None and asked.beams is not None:
        raise invalid("tool_choice", "a call that must be made is not possible with use_beam_search", UNSUPPORTED)
    if must is not None:
        return _held(asked, must.grammar)
    free = own is None and asked.beams is None
    held = structure.strict_calls(prompt.tools or [], form) if form is not None and free else None
    if held is not None:
        return _held(asked, held)
    strict = [f"tools[{i}].function.strict" for i, tool in enumerate(request.tools or ()) if tool.function.strict]
    return asked._replace(ignored=[*asked.ignored, *strict])


def _held(asked: Asked, grammar: Grammar) -> Asked:
    sampling = msgspec.structs.replace(asked.params.sampling, grammar=grammar)
    return asked._replace(params=msgspec.structs.replace(asked.params, sampling=sampling))


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
        raise invalid(f"{path}.text", f"{path}.text must be a string, not {kind_of(text)}")
    return text


def unknown_in_messages(raw: dict[str, Any]) -> list[str]:
    known = Message.__struct_fields__
    return [f"messages[{i}].{name}" for i, item in enumerate(raw["messages"]) for name in item if name not in known]
