"""`/tokenize` and `/detokenize` on their way in. Pure."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.messages import Chat, Prompt, Text
from octavo.plugins.openai.body import convert, parse
from octavo.plugins.openai.chat import conversation, unknown_in_messages
from octavo.plugins.openai.errors import invalid
from octavo.plugins.openai.types import DetokenizeBody, TokenizeBody


class TokenizeAsked(NamedTuple):
    model: str | None
    prompt: Prompt
    add_special_tokens: bool
    ignored: list[str]


class DetokenizeAsked(NamedTuple):
    model: str | None
    ids: list[int]
    ignored: list[str]


def decode_tokenize(body: bytes) -> TokenizeAsked:
    """`/tokenize`: of a prompt, or of messages as the chat template renders them."""
    raw = parse(body)
    request, ignored = convert(raw, TokenizeBody)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if request.messages is not None:
        prompt: Prompt = Chat(conversation(request.messages))
        ignored += unknown_in_messages(raw)
    else:
        prompt = Text(request.prompt or "")
    return TokenizeAsked(request.model, prompt, request.add_special_tokens, ignored)


def decode_detokenize(body: bytes) -> DetokenizeAsked:
    """`/detokenize`."""
    request, ignored = convert(parse(body), DetokenizeBody)
    return DetokenizeAsked(request.model, request.tokens, ignored)
