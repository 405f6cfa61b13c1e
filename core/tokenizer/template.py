"""Chat templates: Jinja text that comes with a model and turns a conversation into its prompt.

The environment is the one that templates are written against (that of transformers' `apply_chat_template`):
block trimming, loop controls, `tojson`, `raise_exception`, `strftime_now`, the `generation` tag. Templates come
from strangers, so they run in Jinja's sandbox, and whatever goes wrong inside one is the conversation's or the
template's fault, not ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """The prompt's text, up to where the assistant is to speak. Raises `TemplateError`."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if (template := self._templates.get(name)) is None:
            raise TemplateError(f"the model has no default chat template, only {', '.join(sorted(self._templates))}")
        try:
            return template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise TemplateError(f"the model's chat template cannot render this conversation: {error}") from error
