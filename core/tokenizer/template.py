"""Chat templates: Jinja text that comes with a model and turns a conversation into its prompt.

The environment is the one that templates are written against (that of transformers' `apply_chat_template`):
block trimming, loop controls, `tojson`, `raise_exception`, `strftime_now`, the `generation` tag. Templates come
from strangers, so they run in Jinja's sandbox, and whatever goes wrong inside one is the conversation's or the
template's fault, not ours.

A template that knows nothing of tools is told of them all the same, in the words that most models have seen (those
of Hermes and Qwen): offered ones in a system message, calls and their results in the turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.core.messages import Chat

_OPEN_END = "\ue000octavo\ue001"
"""Marks where the last message ends; of private use, so no template has an opinion on it."""

_TOOLS_ARE = (
    "You may call functions. Their signatures, one JSON object a line:\n{tools}\n\nTo call one, answer with its name "
    'and arguments:\n<tool_call>\n{{"name": "…", "arguments": {{…}}}}\n</tool_call>'
)


class TemplateError(Exception):
    """A template is not valid, or it could not render a conversation."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - typed so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


class ChatTemplate:
    """A model's templates by name; `default` is used, or `tool_use` when tools are offered and it is there.

    Raises `TemplateError` when one is not valid Jinja."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            self._know_tools = {
                name
                for name, source in sources.items()
                if "tools" in meta.find_undeclared_variables(environment.parse(source))
            }
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """The prompt's text, up to where the assistant is to speak or to go on. Raises `TemplateError`."""
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        if (template := self._templates.get(name)) is None:
            raise TemplateError(f"the model has no default chat template, only {', '.join(sorted(self._templates))}")
        messages = chat.messages if name in self._know_tools else _in_plain_words(chat.messages, chat.tools)
        if chat.continues:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1].get("content", "") + _OPEN_END}]
        given = {
            "documents": None,
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt and not chat.continues,
        }
        try:
            text = template.render(given)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateError(f"the model's chat template cannot render this conversation: {error}") from error
        if not chat.continues:
            return text
        before, mark, _ = text.partition(_OPEN_END)
        if not mark:
            raise TemplateError("the model's chat template leaves out the last message, so it cannot be continued")
        return before


def _in_plain_words(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation with its tools and calls as text; the same if it has none."""
    turns = [_told(message) for message in messages]
    if not tools:
        return turns
    told = _TOOLS_ARE.format(tools="\n".join(_tojson(tool) for tool in tools))
    if turns and turns[0].get("role") == "system":
        return [{**turns[0], "content": f"{turns[0].get('content', '')}\n\n{told}"}, *turns[1:]]
    return [{"role": "system", "content": told}, *turns]


def _told(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [f"<tool_call>\n{_tojson(call.get('function'))}\n</tool_call>" for call in calls]
    text = message.get("content") or ""
    content = "\n".join([text, *lines] if text else lines)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
