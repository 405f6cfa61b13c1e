"""`/v1/responses` on its way in: its items become the messages of a chat, and the rest its fields. Pure.

Nothing is stored: what refers to an earlier response is refused. Input is text; the only tools are functions.
"""

from __future__ import annotations

from typing import Any

from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import ResponsesBody

TEXT_PARTS = ("input_text", "output_text", "text")


def as_chat(request: ResponsesBody) -> dict[str, Any]:
    """The body of the chat that asks for the same."""
    given = {
        "messages": _messages(request),
        "model": request.model,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
        "tools": [_tool(tool, i) for i, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _format(request.text),
    }
    return {key: value for key, value in given.items() if value is not None}


def settings(request: ResponsesBody) -> dict[str, Any]:
    """What a response tells of its request."""
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }


def _messages(request: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise invalid("input", "input is empty")
    for i, item in enumerate(request.input):
        path = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{path}.content")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if messages and messages[-1].get("tool_calls"):
                    messages[-1]["tool_calls"].append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = _text(item.get("output"), f"{path}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                pass  # what a model thought is not told to it again
            case other:
                raise invalid(f"{path}.type", f"{path} is an item of type {str(other)[:40]!r}, which is not served")
    return messages


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, f"{path} must be a string or a list of parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise invalid(
                f"{path}[{i}]", f"{path}[{i}] is not text: only parts of type {', '.join(TEXT_PARTS)} are served"
            )
        texts.append(part["text"])
    return "".join(texts)


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(
            f"tools[{i}].type", f"tools[{i}] is of type {str(tool.get('type'))[:40]!r}: only function is served"
        )
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(request: ResponsesBody) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if isinstance(choice, dict):
        return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return None if choice == "auto" and not request.tools else choice


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
