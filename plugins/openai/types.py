"""The bodies of requests as types: every field that has an effect here, and its range.

Fields that are known but not served, and unknown ones, are the business of `decode`. Where a field is null it is
as if it were absent, as in OpenAI's API. Knows nothing of HTTP or the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=128)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Stops: TypeAlias = str | Annotated[list[str], Meta(max_length=16)]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None


class Message(Struct, kw_only=True):
    """One turn. `content` is a string, null, or a list of parts, whatever the role."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Generation(Struct, kw_only=True):
    """What both ways to generate have in common."""

    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    seed: int | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None


class ChatBody(Generation, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionBody(Generation, kw_only=True):
    prompt: str | list[Any]
    """A string, a list of strings, a list of ids, or a list of lists of ids: told apart by `decode`."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None


class TokenizeBody(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
